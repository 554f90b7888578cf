#include "work.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

struct lane {
    struct work_job *head;
    struct work_job **tail;
};

struct work {
    pthread_mutex_t lock;
    pthread_cond_t wake,
        wake_spare; /* the threads that take requests, and the one that does not */
    struct lane lanes[WORK_N_LANES];
    int32_t n_requests; /* waiting in WORK_REQUEST and WORK_BULK */
    int32_t max_requests;
    int32_t n_bulk, max_bulk; /* of WORK_BULK, being run */
    bool is_closing;
    int32_t n_running; /* jobs being run; while closing, they may post more */
    int32_t n_threads;
    pthread_t threads[];
};

/* With the lock held; NULL when nothing may be taken of the first n_lanes. */
static struct work_job *take_job(struct work *w, int n_lanes, enum work_lane *lane)
{
    for (int i = 0; i < n_lanes; i++) {
        struct lane *l = &w->lanes[i];
        struct work_job *job = l->head;
        if (!job || (i == WORK_BULK && w->n_bulk == w->max_bulk))
            continue;
        l->head = job->next;
        if (!l->head)
            l->tail = &l->head;
        if (i >= WORK_REQUEST)
            w->n_requests--;
        w->n_bulk += i == WORK_BULK;
        *lane = (enum work_lane)i;
        return job;
    }
    return NULL;
}

static void wake_all(struct work *w)
{
    pthread_cond_broadcast(&w->wake);
    pthread_cond_signal(&w->wake_spare);
}

static void work(struct work *w, int n_lanes, pthread_cond_t *wake)
{
    pthread_mutex_lock(&w->lock);
    for (;;) {
        enum work_lane lane;
        struct work_job *job = take_job(w, n_lanes, &lane);
        if (job) {
            w->n_running++;
            pthread_mutex_unlock(&w->lock);
            job->run(job);
            pthread_mutex_lock(&w->lock);
            w->n_running--;
            /* Whoever passed over the next one sleeps; this thread looks again itself. */
            w->n_bulk -= lane == WORK_BULK;
        } else if (w->is_closing && w->n_running == 0) {
            break;
        } else {
            pthread_cond_wait(wake, &w->lock);
        }
    }
    /* Others may sleep until the last job has ended. */
    wake_all(w);
    pthread_mutex_unlock(&w->lock);
}

static void *worker_main(void *arg)
{
    struct work *w = arg;
    work(w, WORK_N_LANES, &w->wake);
    return NULL;
}

static void *spare_main(void *arg)
{
    struct work *w = arg;
    work(w, WORK_REQUEST, &w->wake_spare);
    return NULL;
}

int work_open(int32_t n_threads, int32_t max_requests, struct work **out)
{
    size_t n_all = (size_t)n_threads + 1;
    struct work *w = calloc(1, sizeof(*w) + n_all * sizeof(w->threads[0]));
    if (!w)
        return ERR_NOMEM;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->wake, NULL);
    pthread_cond_init(&w->wake_spare, NULL);
    for (int i = 0; i < WORK_N_LANES; i++)
        w->lanes[i].tail = &w->lanes[i].head;
    w->max_requests = max_requests;
    w->max_bulk = n_threads > 1 ? n_threads / 2 : 1;
    while (w->n_threads < n_threads + 1) {
        if (pthread_create(&w->threads[w->n_threads], NULL,
                           w->n_threads < n_threads ? worker_main : spare_main, w) != 0) {
            work_close(w);
            return ERR_IO;
        }
        w->n_threads++;
    }
    *out = w;
    return 0;
}

int work_post(struct work *w, enum work_lane lane, struct work_job *job)
{
    job->next = NULL;
    pthread_mutex_lock(&w->lock);
    if (lane >= WORK_REQUEST && w->n_requests >= w->max_requests) {
        pthread_mutex_unlock(&w->lock);
        return ERR_FULL;
    }
    if (lane >= WORK_REQUEST)
        w->n_requests++;
    *w->lanes[lane].tail = job;
    w->lanes[lane].tail = &job->next;
    /* One of those that take requests, which looks again after each job; it may be busy with a
     * long one, so that what must not wait for that wakes the spare, too. */
    pthread_cond_signal(&w->wake);
    if (lane < WORK_REQUEST)
        pthread_cond_signal(&w->wake_spare);
    pthread_mutex_unlock(&w->lock);
    return 0;
}

void work_close(struct work *w)
{
    if (!w)
        return;
    pthread_mutex_lock(&w->lock);
    w->is_closing = true;
    wake_all(w);
    pthread_mutex_unlock(&w->lock);
    for (int32_t i = 0; i < w->n_threads; i++)
        pthread_join(w->threads[i], NULL);
    pthread_cond_destroy(&w->wake);
    pthread_cond_destroy(&w->wake_spare);
    pthread_mutex_destroy(&w->lock);
    free(w);
}
