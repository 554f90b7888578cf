/* A folder that keeps sessions over a restart: one file (state_file.h) each, ID.safetensors.
 *
 * Written when the engine has stopped, and brought back, and then removed, before it starts: so
 * what a daemon has changed since is never met again. Main thread; reads and writes files, waits
 * for the device. A file is whole or not there: it is written beside its place, synced, renamed. */
#ifndef PREFILLD_SESSION_DIR_H
#define PREFILLD_SESSION_DIR_H

#include "api_transfer.h"

struct session_dir {
    const char *path;
    struct transfers *transfers;
    struct sessions *sessions;
    /* Asked before each file is saved; false: no more. */
    bool (*goes_on)(void *arg);
    void *arg;
};

/* Is there a folder that may be written to? Returns 0 or ERR_INVALID. */
int session_dir_check(const char *path, struct errmsg *e);
/* Saves every session; what fails is logged, and the others go on. */
void session_dir_save(const struct session_dir *d);
/* Brings back what is there: names, times left and pins as they were, those that have expired
 * excepted. A file that is damaged is logged and renamed to NAME.bad; one of another model or
 * version, or one for which there is no room, is logged and stays. */
void session_dir_load(const struct session_dir *d);

#endif
