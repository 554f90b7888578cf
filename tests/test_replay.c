/* Replays of the scheduler: tests/replay/NAME.replay, one command a line, '#' starts a comment.
 *
 *   set policy short-first|fcfs                     before anything else; and
 *   set max-step-tokens|max-seqs|max-waiting|slots|pages|page-tokens N
 *   now US             the time          rate TOKENS_PER_US     (0.01 at first)
 *   add NAME TOKENS [priority P] [deadline US] [cached N]       arrives now
 *   full NAME TOKENS   the same, and is refused
 *   step NAME TOKENS + NAME TOKENS ...   plans a step; these are its pieces; `step -`: none
 *   end NAMES|-        the oldest step in flight ends and completes these
 *   steps N NAME TOKENS + ...   N times `step` with an `end` that completes nothing
 *   cancel NAME        expire NAMES|-    those found past their deadline, in order
 *   count waiting|running|backlog|free-slots|free-pages N
 *
 * A file ends idle: nothing in flight, waiting, running or held. */
#include <criterion/criterion.h>
#include <dirent.h>

#include "leaks.h"
#include "sched_world.h"

enum { LINE_MAX_BYTES = 1024, SCENARIOS = 21 };

TestSuite(replay, .fini = leaks_check);

struct replay {
    struct world w;
    bool is_open;
    int32_t n_slots, n_pages, page_tokens;
    char where[256];
    char *rest; /* of the line */
};

/* The next word of the line, or NULL. */
static char *next_word(struct replay *r)
{
    return strtok_r(NULL, " \t\n", &r->rest);
}

static int64_t next_int(struct replay *r)
{
    char *word = next_word(r), *end = NULL;
    int64_t x = word ? strtoll(word, &end, 10) : 0;
    cr_assert(word && end != word && !*end, "%s: a number is missing", r->where);
    return x;
}

/* The rest of the line with single blanks, without a comment; "-" is "". */
static void rest_of_line(struct replay *r, char *out)
{
    out[0] = 0;
    for (char *word; (word = next_word(r));) {
        if (out[0])
            strcat(out, " ");
        strcat(out, word);
    }
    if (!strcmp(out, "-"))
        out[0] = 0;
}

static void command_set(struct replay *r)
{
    char *key = next_word(r);
    cr_assert(key && !r->is_open, "%s: set what, or set too late", r->where);
    if (!strcmp(key, "policy")) {
        char *policy = next_word(r);
        cr_assert(policy, "%s: which policy", r->where);
        bool is_fcfs = !strcmp(policy, "fcfs");
        cr_assert(is_fcfs || !strcmp(policy, "short-first"), "%s: policy %s", r->where, policy);
        r->w.c.policy = is_fcfs ? SCHED_FCFS : SCHED_SHORT_FIRST;
        return;
    }
    int32_t x = (int32_t)next_int(r);
    if (!strcmp(key, "max-step-tokens"))
        r->w.c.max_step_tokens = x;
    else if (!strcmp(key, "max-seqs"))
        r->w.c.max_seqs = x;
    else if (!strcmp(key, "max-waiting"))
        r->w.c.max_waiting = x;
    else if (!strcmp(key, "slots"))
        r->n_slots = x;
    else if (!strcmp(key, "pages"))
        r->n_pages = x;
    else if (!strcmp(key, "page-tokens"))
        r->page_tokens = x;
    else
        cr_assert_fail("%s: set %s", r->where, key);
}

static void command_add(struct replay *r, bool is_refused)
{
    char *name = next_word(r);
    cr_assert(name, "%s: a name is missing", r->where);
    struct sched_item item = {.n_tokens = (int32_t)next_int(r)};
    for (char *key; (key = next_word(r));) {
        if (!strcmp(key, "priority"))
            item.priority = (int32_t)next_int(r);
        else if (!strcmp(key, "deadline"))
            item.deadline_us = next_int(r);
        else if (!strcmp(key, "cached"))
            item.n_planned = (int32_t)next_int(r);
        else
            cr_assert_fail("%s: add %s", r->where, key);
    }
    bool is_added = world_add(&r->w, name, &item) != NULL;
    cr_assert_eq(is_added, !is_refused, "%s: %s was %s", r->where, name,
                 is_added ? "taken" : "refused");
}

static void command_cancel(struct replay *r)
{
    char *name = next_word(r);
    for (int32_t i = 0; name && i < r->w.n_jobs; i++) {
        if (!strcmp(r->w.jobs[i]->name, name) && !r->w.jobs[i]->is_gone) {
            world_cancel(&r->w, r->w.jobs[i]);
            return;
        }
    }
    cr_assert_fail("%s: nobody to cancel", r->where);
}

static void command_step(struct replay *r, const char *expected)
{
    char got[LINE_MAX_BYTES] = "";
    const struct world_step *s = world_plan(&r->w);
    for (int32_t i = 0; i < s->n; i++)
        snprintf(got + strlen(got), sizeof(got) - strlen(got), "%s%s %d", i ? " + " : "",
                 world_job_of(s->pieces[i].item)->name, s->pieces[i].n_tokens);
    cr_assert_str_eq(got, expected, "%s: the step is '%s'", r->where, got);
}

static void command_end(struct replay *r, const char *expected)
{
    char got[LINE_MAX_BYTES];
    world_end_step(&r->w, got, sizeof(got));
    cr_assert_str_eq(got, expected, "%s: completes '%s'", r->where, got);
}

static void command_expire(struct replay *r, const char *expected)
{
    char got[LINE_MAX_BYTES] = "";
    for (struct job *j; (j = world_expire(&r->w));)
        snprintf(got + strlen(got), sizeof(got) - strlen(got), "%s%s", got[0] ? " " : "",
                 j->name);
    cr_assert_str_eq(got, expected, "%s: '%s' expired", r->where, got);
}

static void command_count(struct replay *r)
{
    const char *what = next_word(r);
    cr_assert(what, "%s: count what", r->where);
    int64_t got = -1, expected = next_int(r);
    if (!strcmp(what, "waiting"))
        got = sched_n_waiting(r->w.sched);
    else if (!strcmp(what, "running"))
        got = sched_n_running(r->w.sched);
    else if (!strcmp(what, "backlog"))
        got = sched_backlog_tokens(r->w.sched);
    else if (!strcmp(what, "free-slots"))
        got = r->w.slots.n_free;
    else if (!strcmp(what, "free-pages"))
        got = r->w.pages.n_free;
    else
        cr_assert_fail("%s: count %s", r->where, what);
    cr_assert_eq(got, expected, "%s: %s is %lld", r->where, what, (long long)got);
}

static void run_line(struct replay *r, char *line)
{
    line[strcspn(line, "#")] = 0;
    char *command = strtok_r(line, " \t\n", &r->rest);
    if (!command)
        return;
    if (!strcmp(command, "set")) {
        command_set(r);
        return;
    }
    if (!r->is_open) {
        struct sched_config c = r->w.c;
        world_open(&r->w, &c, r->n_slots, r->n_pages, r->page_tokens);
        r->w.where = r->where;
        r->is_open = true;
    }
    char text[LINE_MAX_BYTES] = "";
    if (!strcmp(command, "now")) {
        r->w.now_us = next_int(r);
    } else if (!strcmp(command, "rate")) {
        rest_of_line(r, text);
        r->w.rate = strtod(text, NULL);
    } else if (!strcmp(command, "add") || !strcmp(command, "full")) {
        command_add(r, command[0] == 'f');
    } else if (!strcmp(command, "cancel")) {
        command_cancel(r);
    } else if (!strcmp(command, "count")) {
        command_count(r);
    } else if (!strcmp(command, "steps")) {
        int64_t n = next_int(r);
        rest_of_line(r, text);
        for (; n > 0; n--) {
            command_step(r, text);
            command_end(r, "");
        }
    } else {
        rest_of_line(r, text);
        if (!strcmp(command, "step"))
            command_step(r, text);
        else if (!strcmp(command, "end"))
            command_end(r, text);
        else if (!strcmp(command, "expire"))
            command_expire(r, text);
        else
            cr_assert_fail("%s: unknown command %s", r->where, command);
    }
}

static void replay_dir(char *out, size_t cap)
{
    const char *srcdir = getenv("SRCDIR");
    snprintf(out, cap, "%s/tests/replay", srcdir ? srcdir : ".");
}

static void run_replay(const char *name)
{
    char dir[512], path[640], line[LINE_MAX_BYTES];
    replay_dir(dir, sizeof(dir));
    snprintf(path, sizeof(path), "%s/%s.replay", dir, name);
    FILE *f = fopen(path, "r");
    cr_assert(f, "%s cannot be opened", path);
    struct replay r = {.n_slots = 64, .n_pages = 8192, .page_tokens = 64};
    r.w.c = (struct sched_config){SCHED_SHORT_FIRST, 8192, 256, 64, 0};
    for (int n = 1; fgets(line, sizeof(line), f); n++) {
        snprintf(r.where, sizeof(r.where), "%s.replay:%d", name, n);
        run_line(&r, line);
    }
    fclose(f);
    cr_assert(r.is_open, "%s says nothing", path);
    world_check_idle(&r.w);
    world_close(&r.w);
}

#define REPLAY(name)                                                                           \
    Test(replay, name)                                                                         \
    {                                                                                          \
        run_replay(#name);                                                                     \
    }

REPLAY(align)
REPLAY(cached)
REPLAY(cancel)
REPLAY(deadline)
REPLAY(example)
REPLAY(example_fcfs)
REPLAY(fcfs)
REPLAY(full_pages)
REPLAY(full_pages_fcfs)
REPLAY(full_slots)
REPLAY(full_waiting)
REPLAY(huge)
REPLAY(huge_company)
REPLAY(join)
REPLAY(max_seqs)
REPLAY(priority)
REPLAY(rate)
REPLAY(step64)
REPLAY(stream)
REPLAY(tails)
REPLAY(ties)

/* A file that no test names would never fail. */
Test(replay, every_file_has_a_test)
{
    char dir[512];
    replay_dir(dir, sizeof(dir));
    DIR *d = opendir(dir);
    cr_assert(d, "%s cannot be opened", dir);
    int n = 0;
    for (struct dirent *e; (e = readdir(d));)
        n += strstr(e->d_name, ".replay") != NULL;
    closedir(d);
    cr_assert_eq(n, SCENARIOS, "%d files in %s", n, dir);
}
