/* The readers of GET /v1/steps. */
#ifndef PREFILLD_API_STEPS_H
#define PREFILLD_API_STEPS_H

#include <pthread.h>
#include <stdatomic.h>

struct api;
struct steps_reader;

struct steps_readers {
    pthread_mutex_t lock; /* of the list; before http's and the workers' */
    struct steps_reader *first;
    atomic_bool is_closing;
};

void steps_readers_init(struct steps_readers *l);
void steps_readers_fini(struct steps_readers *l);

/* There are more steps in api->steps. Any thread; does not wait. arg: the struct api. */
void api_steps_notify(void *arg);
/* Ends every stream, and those to come: the server stops. */
void api_steps_close(struct api *a);

#endif
