/* The listening sockets of a server: its own, and those handed over to it. What is done with
 * them while it runs is the watcher's (http_conn.c); here is what others ask of it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "http_impl.h"

static void add_address(struct http *h, const struct listener *l)
{
    size_t len = strlen(h->addresses);
    snprintf(h->addresses + len, sizeof(h->addresses) - len, "%s%s", len ? "," : "",
             l->address);
}

static bool is_inherited(const struct http *h, const char *address)
{
    for (int32_t i = 0; i < h->n_listeners; i++)
        if (h->listeners[i].is_adopted && strcmp(h->listeners[i].address, address) == 0)
            return true;
    return false;
}

int http_open_listeners(struct http *h, const struct http_config *c, struct errmsg *e)
{
    size_t n = (size_t)(c->n_inherited + c->n_listen);
    h->listeners = calloc(n, sizeof(*h->listeners));
    h->listener_tokens = calloc(n, sizeof(*h->listener_tokens));
    if (!h->listeners || !h->listener_tokens)
        return errmsg_set(e, ERR_NOMEM, "no memory for the listening sockets");
    for (int32_t i = 0; i < c->n_inherited; i++) {
        int rc = listener_adopt(c->inherited[i], &h->listeners[h->n_listeners], e);
        if (rc != 0)
            return rc;
        add_address(h, &h->listeners[h->n_listeners++]);
    }
    for (int32_t i = 0; i < c->n_listen; i++) {
        if (is_inherited(h, c->listen[i]))
            continue;
        int rc = listener_open(c->listen[i], &h->listeners[h->n_listeners], e);
        if (rc != 0)
            return rc;
        add_address(h, &h->listeners[h->n_listeners++]);
    }
    return 0;
}

void http_accept_inherited(struct http *h)
{
    pthread_mutex_lock(&h->lock);
    h->wants_inherited = true;
    watch_wake(h->watch);
    pthread_mutex_unlock(&h->lock);
}

void http_release_inherited(struct http *h)
{
    pthread_mutex_lock(&h->lock);
    h->releases_inherited = true;
    watch_wake(h->watch);
    while (h->releases_inherited && !h->are_listeners_closed)
        pthread_cond_wait(&h->changed, &h->lock);
    pthread_mutex_unlock(&h->lock);
}

int32_t http_n_incoming(struct http *h)
{
    int32_t n = 0;
    pthread_mutex_lock(&h->lock);
    for (const struct conn *c = h->conns; c; c = c->next)
        n += !c->is_expired && (c->phase == CONN_HEADERS || c->phase == CONN_BODY);
    n += h->n_adding;
    pthread_mutex_unlock(&h->lock);
    return n;
}
