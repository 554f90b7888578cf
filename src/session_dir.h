/* A folder that keeps sessions over a restart: one file (state_file.h) each, ID.safetensors.
 *
 * Written when the engine has stopped, and brought back, and then removed, before it starts: so
 * what a daemon has changed since is never met again. Main thread; reads and writes files,
 * waits for the device. A file is whole or not there: it is written beside its place, synced,
 * renamed.
 *
 * One daemon at a time has the folder, from before it brings back until it has saved: it holds
 * a lock (flock) on prefilld.lock there, which ends with its process, however that ends. The
 * file itself stays, so that two can never hold locks on two of them. */
#ifndef PREFILLD_SESSION_DIR_H
#define PREFILLD_SESSION_DIR_H

#include "api_transfer.h"

struct session_dir {
    const char *path;
    struct transfers *transfers;
    struct sessions *sessions;
    /* Asked before each file is saved, and while another daemon has the folder; false: no
     * more. */
    bool (*goes_on)(void *arg);
    void *arg;
    int lock_fd; /* -1: not ours */
};

/* Is there a folder that may be written to? Returns 0 or ERR_INVALID. */
int session_dir_check(const char *path, struct errmsg *e);
/* Takes the folder; another daemon that has it is logged, and waited for up to wait_us. Returns
 * 0, ERR_FULL when that has it still, ERR_STOPPED when d->goes_on said so, or ERR_IO. */
int session_dir_lock(struct session_dir *d, int64_t wait_us, struct errmsg *e);
/* Once it is not needed any more, or never was ours. */
void session_dir_unlock(struct session_dir *d);
/* Saves every session; what fails is logged, and the others go on. */
void session_dir_save(const struct session_dir *d);
/* Brings back what is there: names, times left and pins as they were, those that have expired
 * excepted. A file that is damaged is logged and renamed to NAME.bad; one of another model or
 * version, or one for which there is no room, is logged and stays. */
void session_dir_load(const struct session_dir *d);

#endif
