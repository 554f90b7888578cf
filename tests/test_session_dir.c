/* Who has the folder of sessions: one at a time, told who else, waited for, and let in when the
 * other ends, also by a kill. What is saved and brought back is in e2e_export.py. Plain
 * program. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "log.h"
#include "session_dir.h"
#include "tap.h"

enum { LONG_US = 20000000, SHORT_US = 150000 };

static atomic_int n_asked;
static int asks_left; /* until goes_on says no */

static bool goes_on(void *arg)
{
    (void)arg;
    atomic_fetch_add(&n_asked, 1);
    return asks_left-- > 0;
}

static struct session_dir dir_at(const char *path)
{
    asks_left = 1000000;
    atomic_store(&n_asked, 0);
    return (struct session_dir){.path = path, .goes_on = goes_on, .lock_fd = -1};
}

static void test_one_at_a_time(const char *path)
{
    struct session_dir a = dir_at(path), b = dir_at(path);
    struct errmsg e;
    char holder[64];
    snprintf(holder, sizeof(holder), "(process %d on ", (int)getpid());
    CHECK(session_dir_lock(&a, 0, &e) == 0 && a.lock_fd >= 0 && n_asked == 0, "one takes it");
    CHECK(session_dir_lock(&b, SHORT_US, &e) == ERR_FULL && b.lock_fd == -1 &&
              strstr(e.text, path) && strstr(e.text, holder) && n_asked > 0,
          "another waits, and is told who has it: %s", e.text);
    asks_left = 2;
    CHECK(session_dir_lock(&b, LONG_US, &e) == ERR_STOPPED && b.lock_fd == -1,
          "or until it is to stop");
    session_dir_unlock(&a);
    CHECK(session_dir_lock(&b, 0, &e) == 0, "then it may have it");
    session_dir_unlock(&b);
    session_dir_unlock(&b);
}

static void *unlock_later(void *arg)
{
    while (atomic_load(&n_asked) < 2)
        usleep(1000);
    session_dir_unlock(arg);
    return NULL;
}

static void test_hand_over(const char *path)
{
    struct session_dir a = dir_at(path), b = dir_at(path);
    struct errmsg e;
    pthread_t thread;
    CHECK(session_dir_lock(&a, 0, &e) == 0, "one has it");
    pthread_create(&thread, NULL, unlock_later, &a);
    CHECK(session_dir_lock(&b, LONG_US, &e) == 0 && atomic_load(&n_asked) >= 2,
          "another gets it when it is let go of");
    pthread_join(thread, NULL);
    session_dir_unlock(&b);
}

static void test_crash(const char *path)
{
    struct session_dir a = dir_at(path);
    struct errmsg e;
    int ready[2];
    char c;
    if (pipe(ready) != 0)
        printf("Bail out! pipe\n");
    pid_t child = fork();
    if (child == 0) {
        if (session_dir_lock(&a, 0, &e) == 0 && write(ready[1], "x", 1) == 1)
            pause();
        _exit(1);
    }
    CHECK(read(ready[0], &c, 1) == 1 && session_dir_lock(&a, 0, &e) == ERR_FULL,
          "another process has it");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    CHECK(session_dir_lock(&a, 0, &e) == 0, "and has not when it was killed");
    session_dir_unlock(&a);
    close(ready[0]);
    close(ready[1]);
}

int main(void)
{
    char path[] = "/tmp/prefilld-dir-XXXXXX", lock[64];
    struct errmsg e;
    if (!mkdtemp(path)) {
        printf("Bail out! mkdtemp\n");
        return 1;
    }
    log_set_level(LOG_LEVEL_ERROR);
    test_one_at_a_time(path);
    test_hand_over(path);
    test_crash(path);
    snprintf(lock, sizeof(lock), "%s/prefilld.lock", path);
    CHECK(unlink(lock) == 0 && rmdir(path) == 0, "there is one file");
    struct session_dir gone = dir_at(path);
    CHECK(session_dir_lock(&gone, LONG_US, &e) == ERR_IO && strstr(e.text, lock),
          "a folder that is not there: %s", e.text);
    return tap_done();
}
