#define _GNU_SOURCE /* memmem */
#include "api_messages.h"

#include <stdlib.h>
#include <string.h>

#include "utf8.h"

/* ---- templates ---- */

/* What the model's template does that ChatML alone does not. */
struct template
{
    bool is_other;     /* it is not ChatML */
    bool has_system;   /* a system message of its own, where the messages begin with none */
    bool system_first; /* a system message further on is an error */
    bool wants_query;  /* messages without a question of the user's are an error */
    bool trims;        /* blanks around a message are dropped */
    bool splits;       /* what was thought is told from the answer, and dropped */
    /* But for answers behind the last question it is shown, in a block that is always there;
     * shows_some: only in the last message and where something was thought. */
    bool shows, shows_some;
    bool can_preserve, preserves; /* preserve_thinking shows it in all */
    bool thinks;                  /* when not told otherwise */
    bool has_switch;              /* enable_thinking is known to it */
    bool opens;                   /* "<think>" is part of the prompt when it thinks */
};

/* Is there a literal `<|im_start|>system\n...<|im_end|>` with a text of the template's own? */
static bool has_own_system(const char *text)
{
    static const char start[] = "<|im_start|>system";
    for (const char *at = text; (at = strstr(at, start)) != NULL; at += sizeof(start) - 1) {
        const char *from = at + sizeof(start) - 1;
        const char quote = at > text && (at[-1] == '\'' || at[-1] == '"') ? at[-1] : '{';
        if (*from == '\n')
            from++;
        else if (from[0] == '\\' && from[1] == 'n')
            from += 2;
        const char *end = strstr(from, "<|im_end|>"), *close = strchr(from, quote);
        if (end && end > from && (!close || end < close))
            return true;
    }
    return false;
}

static struct template read_template(const char *text)
{
    struct template o = {0};
    const char *end = NULL;
    if (!text)
        return o;
    o.is_other = !strstr(text, "<|im_start|>");
    o.has_system = has_own_system(text);
    o.system_first = strstr(text, "System message must be at the beginning") != NULL;
    o.wants_query = strstr(text, "No user query found") != NULL;
    o.trims = strstr(text, "render_content(message.content, true)|trim") != NULL;
    o.splits = strstr(text, "split('</think>')") != NULL;
    o.shows = o.splits && strstr(text, "loop.index0 > ns.last_query_index");
    o.shows_some = strstr(text, "loop.last or (not loop.last and reasoning_content)") != NULL;
    o.can_preserve = o.shows && strstr(text, "preserve_thinking is true");
    o.preserves = o.can_preserve && strstr(text, "preserve_thinking is undefined");
    for (const char *p = text; (p = strstr(p, "add_generation_prompt")) != NULL; p++)
        end = p;
    if (!end)
        return o;
    const char *think = strstr(end, "<think>");
    const char *known = strstr(end, "enable_thinking");
    o.has_switch = known != NULL;
    o.thinks = known ? !strstr(known, "enable_thinking is true") : think != NULL;
    o.opens = think && (!known || strstr(think + 1, "<think>"));
    return o;
}

/* The switches of chat_template_kwargs. */
static int read_switches(const json_t *root, struct template *o, struct json_error *e)
{
    const json_t *v = json_object_get(root, "chat_template_kwargs");
    if (!v || json_is_null(v))
        return 0;
    if (!json_is_object(v))
        return json_fail(e, ERR_INVALID, "chat_template_kwargs",
                         "chat_template_kwargs is %s; an object is accepted", json_kind(v));
    bool thinks = o->thinks;
    int rc = json_get_bool(v, "enable_thinking", &thinks, e);
    if (o->has_switch)
        o->thinks = thinks;
    return rc == 0 && o->can_preserve ? json_get_bool(v, "preserve_thinking", &o->preserves, e)
                                      : rc;
}

/* ---- pieces of text ---- */

struct span {
    const char *p;
    size_t len;
};

/* What Python's strip takes for a blank, as templates are run by it. */
static bool is_blank(uint32_t c)
{
    return c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1c && c <= 0x1f) || c == 0x85 ||
           c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 ||
           c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

static bool is_newline(uint32_t c)
{
    return c == '\n';
}

static struct span strip_left(struct span s, bool (*is_dropped)(uint32_t))
{
    size_t used;
    while (s.len > 0 && is_dropped(utf8_decode((const unsigned char *)s.p, &used))) {
        s.p += used;
        s.len -= used;
    }
    return s;
}

static struct span strip_right(struct span s, bool (*is_dropped)(uint32_t))
{
    size_t used;
    for (size_t at = s.len; at > 0;) {
        do
            at--;
        while (at > 0 && ((unsigned char)s.p[at] & 0xc0) == 0x80);
        if (!is_dropped(utf8_decode((const unsigned char *)s.p + at, &used)))
            break;
        s.len = at;
    }
    return s;
}

static struct span strip(struct span s, bool (*is_dropped)(uint32_t))
{
    return strip_right(strip_left(s, is_dropped), is_dropped);
}

static struct span before_first(struct span s, const char *mark)
{
    const char *at = s.len > 0 ? memmem(s.p, s.len, mark, strlen(mark)) : NULL;
    return at ? (struct span){s.p, (size_t)(at - s.p)} : s;
}

static struct span after_last(struct span s, const char *mark)
{
    const char *at;
    while (s.len > 0 && (at = memmem(s.p, s.len, mark, strlen(mark))) != NULL) {
        at += strlen(mark);
        s = (struct span){at, s.len - (size_t)(at - s.p)};
    }
    return s;
}

static void add_span(struct buf *b, struct span s)
{
    buf_add(b, s.p, s.len);
}

/* ---- messages ---- */

/* Where a message stands. */
struct place {
    bool is_late; /* behind the last question, or as if it were */
    bool is_last;
    bool is_open; /* the answer goes on */
};

static int fail_message(struct json_error *e, size_t i, const char *what)
{
    return json_fail(e, ERR_INVALID, "messages", "messages[%zu] %s", i, what);
}

/* As OpenAI's two calls name them; some clients leave the type out. */
static bool is_text_type(const json_t *type)
{
    const char *name = json_string_value(type);
    if (!name)
        return !type || json_is_null(type);
    return strcmp(name, "text") == 0 || strcmp(name, "input_text") == 0 ||
           strcmp(name, "output_text") == 0;
}

/* A string, or a list of parts of which each is a text. */
static int add_content(struct buf *b, const json_t *content, size_t i, struct json_error *e)
{
    const json_t *part;
    size_t j;
    if (!content || json_is_null(content))
        return 0;
    if (json_is_string(content)) {
        buf_add(b, json_string_value(content), json_string_length(content));
        return 0;
    }
    if (!json_is_array(content))
        return fail_message(e, i, "has content that is neither a string nor a list of parts");
    json_array_foreach(content, j, part)
    {
        const json_t *text = json_object_get(part, "text");
        if (!json_is_string(text) || !is_text_type(json_object_get(part, "type")))
            return fail_message(e, i, "has a part that is no text; only text is served");
        buf_add(b, json_string_value(text), json_string_length(text));
    }
    return 0;
}

/* system, user or assistant; NULL: none of them. */
static const char *role_of(const json_t *m)
{
    static const char *const roles[] = {"system", "user", "assistant"};
    const char *role = json_string_value(json_object_get(m, "role"));
    if (role && strcmp(role, "developer") == 0)
        return roles[0];
    for (int i = 0; role && i < 3; i++)
        if (strcmp(role, roles[i]) == 0)
            return roles[i];
    return NULL;
}

static int check_message(const struct template *o, const json_t *m, size_t i,
                         struct json_error *e)
{
    const char *role = role_of(m);
    if (!role)
        return fail_message(e, i,
                            "is no object with a role of system, developer, user or assistant");
    if (json_array_size(json_object_get(m, "tool_calls")) > 0)
        return fail_message(e, i, "has tool_calls; tools are not served by this version");
    const json_t *said = json_object_get(m, "content");
    if ((!said || json_is_null(said)) && strcmp(role, "assistant") != 0)
        return fail_message(e, i, "has no content; a string or a list of texts is accepted");
    if (i > 0 && o->system_first && strcmp(role, "system") == 0)
        return fail_message(e, i,
                            "is a system message; the model's chat_template takes one as the "
                            "first message alone");
    if (i == 0 && o->has_system && strcmp(role, "system") != 0)
        return fail_message(e, i,
                            "is no system message; the model's chat_template then adds one of "
                            "its own, which is not done here: give one");
    return 0;
}

/* What was thought, under the first of the names that clients have for it, in the order of
 * transformers. */
static const json_t *get_thought(const json_t *m)
{
    static const char *const names[] = {"reasoning_content", "thinking", "reasoning"};
    for (int i = 0; i < 3; i++) {
        const json_t *v = json_object_get(m, names[i]);
        if (v && !json_is_null(v))
            return v;
    }
    return NULL;
}

static void add_answer(struct buf *b, const struct template *o, const json_t *m,
                       struct span text, const struct place *at)
{
    static const char mark[] = "</think>";
    const json_t *given = get_thought(m);
    bool is_late = at->is_late;
    struct span thought = {"", 0}, rest = before_first(text, mark);
    bool is_split = rest.len < text.len;
    if (json_is_string(given)) {
        thought = (struct span){json_string_value(given), json_string_length(given)};
    } else if (is_split) {
        thought = after_last(strip_right(rest, is_newline), "<think>");
        thought = strip_left(thought, is_newline);
        text = strip_left(after_last(text, mark), is_newline);
    } else if (at->is_open && text.len >= 7 && memcmp(text.p, "<think>", 7) == 0) {
        is_late = false; /* a thought that is to go on: it is all there is */
    }
    if (is_late && (!o->shows_some || at->is_last || thought.len > 0)) {
        buf_adds(b, "<think>\n");
        add_span(b, strip(thought, o->trims ? is_blank : is_newline));
        buf_adds(b, "\n</think>\n\n");
        if (!o->trims)
            text = strip_left(text, is_newline);
    }
    add_span(b, text);
}

/* The message as the template shows it, but for its end. */
static int add_message(struct buf *b, const struct template *o, const json_t *m, size_t i,
                       const struct place *at, struct json_error *e)
{
    struct buf content;
    buf_init(&content);
    int rc = check_message(o, m, i, e);
    if (rc == 0)
        rc = add_content(&content, json_object_get(m, "content"), i, e);
    if (rc == 0) {
        const char *role = role_of(m);
        struct span text = {content.data ? content.data : "", content.len};
        if (o->trims)
            text = strip(text, is_blank);
        buf_printf(b, "<|im_start|>%s\n", role);
        if (o->splits && strcmp(role, "assistant") == 0)
            add_answer(b, o, m, text, at);
        else
            add_span(b, text);
    }
    b->failed |= content.failed;
    buf_fini(&content);
    return rc;
}

/* The user's last message that is no answer of a tool's, or n. */
static size_t find_query(const struct template *o, const json_t *messages, size_t n)
{
    static const char open[] = "<tool_response>", close[] = "</tool_response>";
    struct json_error ignored;
    for (size_t i = n; i-- > 0;) {
        const json_t *m = json_array_get(messages, i);
        const char *role = role_of(m);
        if (!role || strcmp(role, "user") != 0)
            continue;
        struct buf content;
        buf_init(&content);
        add_content(&content, json_object_get(m, "content"), i, &ignored);
        struct span text = {content.data ? content.data : "", content.len};
        if (o->trims)
            text = strip(text, is_blank);
        bool is_tool = text.len >= strlen(open) && memcmp(text.p, open, strlen(open)) == 0 &&
                       text.len >= strlen(close) &&
                       memcmp(text.p + text.len - strlen(close), close, strlen(close)) == 0;
        buf_fini(&content);
        if (!is_tool)
            return i;
    }
    return n;
}

static int write_messages(const struct template *o, const json_t *messages, bool goes_on,
                          struct buf *b, struct json_error *e)
{
    size_t n = json_array_size(messages), query = find_query(o, messages, n);
    int rc = 0;
    for (size_t i = 0; i < n && rc == 0; i++) {
        struct place at = {
            .is_late = o->shows && (o->preserves || i > query),
            .is_last = i == n - 1,
            .is_open = goes_on && i == n - 1,
        };
        rc = add_message(b, o, json_array_get(messages, i), i, &at, e);
        if (rc == 0 && !at.is_open)
            buf_adds(b, "<|im_end|>\n");
    }
    if (rc == 0 && query == n && o->wants_query)
        return json_fail(e, ERR_INVALID, "messages",
                         "messages has no message of the user; the model's chat_template takes "
                         "no chat without one");
    return rc;
}

/* ---- public ---- */

int messages_write(const char *chat_template, const json_t *root, struct buf *b,
                   struct json_error *e)
{
    const json_t *messages = json_object_get(root, "messages");
    bool opens, goes_on = false;
    struct template o = read_template(chat_template);
    if (json_array_size(messages) == 0)
        return json_fail(e, ERR_INVALID, "messages",
                         "messages is %s; a list of at least one message is accepted",
                         !messages                 ? "missing"
                         : json_is_array(messages) ? "empty"
                                                   : json_kind(messages));
    if (o.is_other)
        return json_fail(e, ERR_INVALID, "messages",
                         "messages: the model's chat_template is not ChatML, which alone is "
                         "served; ask /v1/completions with the text that it makes");
    int rc = json_get_bool(root, "continue_final_message", &goes_on, e);
    opens = !goes_on;
    if (rc == 0)
        rc = json_get_bool(root, "add_generation_prompt", &opens, e);
    if (rc == 0 && opens && goes_on)
        rc = json_fail(e, ERR_INVALID, "continue_final_message",
                       "continue_final_message and add_generation_prompt are both true; one "
                       "of them is accepted");
    if (rc == 0)
        rc = read_switches(root, &o, e);
    if (rc == 0)
        rc = write_messages(&o, messages, goes_on, b, e);
    if (rc != 0 || !opens)
        return rc;
    buf_adds(b, "<|im_start|>assistant\n");
    if (o.thinks && o.opens)
        buf_adds(b, "<think>\n");
    else if (!o.thinks && o.has_switch)
        buf_adds(b, "<think>\n\n</think>\n\n");
    return 0;
}
