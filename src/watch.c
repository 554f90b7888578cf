#include "watch.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { BATCH = 64 };

struct slot {
    void *owner;
    uint32_t generation; /* odd while in use */
    int32_t next_free;
    int fd;
    enum watch_kind kind;
};

struct watch {
    pthread_mutex_t lock; /* of slots and free_head; held while hangup() runs */
    struct watch_ops ops;
    void *arg;
    int epoll_fd;
    int wake_fd; /* data.u64 is 0, which is no token */
    int32_t tick_ms;
    int32_t n_slots;
    int32_t free_head; /* -1: all in use */
    bool is_started;
    bool is_stopping;
    pthread_t thread;
    struct slot slots[];
};

static uint64_t token_of(const struct watch *w, const struct slot *s)
{
    return (uint64_t)s->generation << 32 | (uint32_t)(s - w->slots);
}

/* With the lock held. The slot a token names, or NULL when it was removed since. */
static struct slot *find_slot(struct watch *w, uint64_t token)
{
    uint32_t i = (uint32_t)token;
    if (i >= (uint32_t)w->n_slots || w->slots[i].generation != token >> 32)
        return NULL;
    return w->slots[i].generation & 1 ? &w->slots[i] : NULL;
}

/* With the lock held, while the descriptor is still open. */
static void free_slot(struct watch *w, struct slot *s)
{
    epoll_ctl(w->epoll_fd, EPOLL_CTL_DEL, s->fd, NULL);
    s->generation++;
    s->owner = NULL;
    s->next_free = w->free_head;
    w->free_head = (int32_t)(s - w->slots);
}

static void dispatch(struct watch *w, uint64_t token)
{
    pthread_mutex_lock(&w->lock);
    struct slot *s = find_slot(w, token);
    if (s && s->kind == WATCH_HANGUP) {
        void *owner = s->owner;
        free_slot(w, s);
        w->ops.hangup(w->arg, owner);
        s = NULL;
    }
    void *owner = s ? s->owner : NULL;
    pthread_mutex_unlock(&w->lock);
    if (s)
        w->ops.readable(w->arg, owner);
}

static void *watch_main(void *arg)
{
    struct watch *w = arg;
    struct epoll_event events[BATCH];
    for (;;) {
        int n = epoll_wait(w->epoll_fd, events, BATCH, w->tick_ms);
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 != 0) {
                dispatch(w, events[i].data.u64);
                continue;
            }
            uint64_t ignored;
            ssize_t got = read(w->wake_fd, &ignored, sizeof(ignored));
            (void)got; /* EAGAIN: another wake was merged into this one */
        }
        pthread_mutex_lock(&w->lock);
        bool is_stopping = w->is_stopping;
        pthread_mutex_unlock(&w->lock);
        w->ops.turn(w->arg);
        if (is_stopping)
            return NULL;
    }
}

int watch_open(int32_t max_fds, int32_t tick_ms, const struct watch_ops *ops, void *arg,
               struct watch **out)
{
    struct watch *w = calloc(1, sizeof(*w) + (size_t)max_fds * sizeof(w->slots[0]));
    if (!w)
        return ERR_NOMEM;
    pthread_mutex_init(&w->lock, NULL);
    w->ops = *ops;
    w->arg = arg;
    w->tick_ms = tick_ms;
    w->n_slots = max_fds;
    w->free_head = max_fds > 0 ? 0 : -1;
    for (int32_t i = 0; i < max_fds; i++)
        w->slots[i].next_free = i + 1 < max_fds ? i + 1 : -1;
    w->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    w->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event ev = {.events = EPOLLIN, .data.u64 = 0};
    if (w->epoll_fd < 0 || w->wake_fd < 0 ||
        epoll_ctl(w->epoll_fd, EPOLL_CTL_ADD, w->wake_fd, &ev) != 0) {
        watch_close(w);
        return ERR_IO;
    }
    *out = w;
    return 0;
}

int watch_start(struct watch *w)
{
    if (pthread_create(&w->thread, NULL, watch_main, w) != 0)
        return ERR_IO;
    w->is_started = true;
    return 0;
}

void watch_close(struct watch *w)
{
    if (!w)
        return;
    if (w->is_started) {
        pthread_mutex_lock(&w->lock);
        w->is_stopping = true;
        pthread_mutex_unlock(&w->lock);
        watch_wake(w);
        pthread_join(w->thread, NULL);
    }
    if (w->epoll_fd >= 0)
        close(w->epoll_fd);
    if (w->wake_fd >= 0)
        close(w->wake_fd);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

int watch_add(struct watch *w, enum watch_kind kind, int fd, void *owner, uint64_t *token)
{
    int rc = ERR_FULL;
    pthread_mutex_lock(&w->lock);
    if (w->free_head >= 0) {
        struct slot *s = &w->slots[w->free_head];
        w->free_head = s->next_free;
        s->owner = owner;
        s->generation++;
        s->fd = fd;
        s->kind = kind;
        *token = token_of(w, s);
        /* EPOLLERR and EPOLLHUP (reset, both sides closed) are always reported. */
        struct epoll_event ev = {.events = kind == WATCH_HANGUP ? EPOLLRDHUP : EPOLLIN,
                                 .data.u64 = *token};
        rc = 0;
        if (epoll_ctl(w->epoll_fd, EPOLL_CTL_ADD, fd, &ev) != 0) {
            free_slot(w, s);
            rc = ERR_IO;
        }
    }
    pthread_mutex_unlock(&w->lock);
    return rc;
}

void watch_remove(struct watch *w, uint64_t token)
{
    pthread_mutex_lock(&w->lock);
    struct slot *s = find_slot(w, token);
    if (s)
        free_slot(w, s);
    pthread_mutex_unlock(&w->lock);
}

void watch_wake(struct watch *w)
{
    uint64_t one = 1;
    ssize_t put = write(w->wake_fd, &one, sizeof(one));
    (void)put; /* EAGAIN: the counter is full, so a wake is pending anyway */
}
