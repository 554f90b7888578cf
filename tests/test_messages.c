/* Prompts of chats, as transformers 5.24 makes them (apply_chat_template) with the templates of
 * the models. Of a template the words stand here that decide. */
#include <criterion/criterion.h>

#include <string.h>

#include "api_messages.h"
#include "leaks.h"

TestSuite(messages, .fini = leaks_check);

#define S "<|im_start|>"
#define E "<|im_end|>\n"
#define ANSWER S "assistant\n"

/* Qwen3-Next-Instruct */
#define PLAIN                                                                                  \
    "{%- if tools %}{{- '" S "system\\n' }}{{- \"# Tools\\n\\nYou may call\" }}"               \
    "{{- \"</tool_call><|im_end|>\\n\" }}{%- else %}{{- '" S                                   \
    "system\\n' + messages[0].content "                                                        \
    "+ '<|im_end|>\\n' }}{%- if add_generation_prompt %}{{- '" S "assistant\\n' }}"
#define SPLIT "content.split('</think>')"
/* Qwen3-Next-Thinking */
#define THINKING                                                                               \
    SPLIT "{%- if loop.index0 > ns.last_query_index %}{%- if loop.last or (not loop.last and " \
          "reasoning_content) %}{%- if add_generation_prompt %}{{- '" S                        \
          "assistant\\n<think>\\n' }}"
/* Qwen3.5, and the same with 3.6's switch */
#define Q35_HEAD                                                                               \
    "raise_exception('No user query found in messages.') {%- set content = "                   \
    "render_content(message.content, true)|trim %}raise_exception('System message must be at " \
    "the beginning.')" SPLIT
#define Q35_END                                                                                \
    "loop.index0 > ns.last_query_index %}{%- if add_generation_prompt %}{{- '" S               \
    "assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- "    \
    "'<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}"
#define Q35 Q35_HEAD Q35_END
#define Q36 Q35_HEAD "(preserve_thinking is defined and preserve_thinking is true) or " Q35_END
/* Older ChatML, with a system message of its own */
#define OLD                                                                                    \
    "{{ '" S "system\nYou are a helpful assistant.<|im_end|>\n' }}{% if "                      \
    "add_generation_prompt %}{{ '" S "assistant\n' }}"

#define USER "{\"role\":\"user\",\"content\":\"x\"}"
#define SAYS(text) "{\"role\":\"assistant\",\"content\":\"" text "\"}"
#define OPEN ",\"continue_final_message\":true"
#define SHUT ",\"add_generation_prompt\":false"

static const struct {
    const char *template, *messages, *more, *want;
} prompts[] = {
    {NULL, USER, "", S "user\nx" E ANSWER},
    {PLAIN, USER "," SAYS("<think>h</think>\\n\\n a ") "," USER, "",
     S "user\nx" E ANSWER "<think>h</think>\n\n a " E S "user\nx" E ANSWER},
    {PLAIN, USER "," SAYS(" a "), OPEN, S "user\nx" E ANSWER " a "},
    {OLD, "{\"role\":\"system\",\"content\":\"s\"}," USER, "",
     S "system\ns" E S "user\nx" E ANSWER},
    /* Blanks are Python's. */
    {Q35, "{\"role\":\"user\",\"content\":\"\\u00a0\\u3000 \\u0085x\\u200b\\u2028\\n\"}", "",
     S "user\nx\xe2\x80\x8b" E ANSWER "<think>\n"},
    {Q35, "{\"role\":\"user\",\"content\":\" \"}", SHUT, S "user\n" E},
    /* Before the last question thoughts are dropped, behind it there is always a block. */
    {Q35, USER "," SAYS("<think>\\nh\\n</think>\\n\\n a ") "," USER, SHUT,
     S "user\nx" E ANSWER " a" E S "user\nx" E},
    {Q35, USER "," SAYS(" a "), SHUT, S "user\nx" E ANSWER "<think>\n\n</think>\n\na" E},
    {Q35, USER "," SAYS("a"), OPEN, S "user\nx" E ANSWER "<think>\n\n</think>\n\na"},
    {Q35, USER "," SAYS("<think>\\n h\\n</think>\\n\\na"), "",
     S "user\nx" E ANSWER "<think>\nh\n</think>\n\na" E ANSWER "<think>\n"},
    {Q35, USER "," SAYS("<think>\\nso"), OPEN, S "user\nx" E ANSWER "<think>\nso"},
    /* Only a thought that is to go on is all there is. */
    {Q35, USER "," SAYS("<think>\\nso"), SHUT,
     S "user\nx" E ANSWER "<think>\n\n</think>\n\n<think>\nso" E},
    {THINKING, USER "," SAYS("<think>\\nso"), "",
     S "user\nx" E ANSWER "<think>\n\n</think>\n\n<think>\nso" E ANSWER "<think>\n"},
    {Q35, USER "," SAYS("a") "," SAYS("b"), SHUT,
     S "user\nx" E ANSWER "<think>\n\n</think>\n\na" E ANSWER "<think>\n\n</think>\n\nb" E},
    {Q35,
     USER "," SAYS("a") ",{\"role\":\"user\",\"content\":\"<tool_response>r</tool_response>\"}",
     SHUT,
     S "user\nx" E ANSWER "<think>\n\n</think>\n\na" E S
       "user\n<tool_response>r</tool_response>" E},
    {Q35,
     USER ",{\"role\":\"assistant\",\"content\":\"<think>q</think>a\","
          "\"reasoning_content\":\"why \"}",
     SHUT, S "user\nx" E ANSWER "<think>\nwhy\n</think>\n\n<think>q</think>a" E},
    /* The names that clients have for what was thought. */
    {Q35,
     USER ",{\"role\":\"assistant\",\"content\":\"a\",\"reasoning_content\":null,"
          "\"reasoning\":\"why\"}",
     SHUT, S "user\nx" E ANSWER "<think>\nwhy\n</think>\n\na" E},
    {Q35, USER ",{\"role\":\"assistant\",\"content\":\"a\",\"thinking\":\"why\"}", SHUT,
     S "user\nx" E ANSWER "<think>\nwhy\n</think>\n\na" E},
    {Q36, USER "," SAYS("<think>h</think>a") "," USER, SHUT,
     S "user\nx" E ANSWER "a" E S "user\nx" E},
    {Q36, USER "," SAYS("<think>h</think>a") "," USER,
     SHUT ",\"chat_template_kwargs\":{\"preserve_thinking\":true}",
     S "user\nx" E ANSWER "<think>\nh\n</think>\n\na" E S "user\nx" E},
    /* A template without the switch always thinks. */
    {THINKING, USER, ",\"chat_template_kwargs\":{\"enable_thinking\":false}",
     S "user\nx" E ANSWER "<think>\n"},
    {THINKING, USER "," SAYS("a") "," SAYS("\\n\\n b"), "",
     S "user\nx" E ANSWER "a" E ANSWER "<think>\n\n</think>\n\n b" E ANSWER "<think>\n"},
    {THINKING, USER "," SAYS("<think>\\nh \\n</think>\\na") "," SAYS("b"), SHUT,
     S "user\nx" E ANSWER "<think>\nh \n</think>\n\na" E ANSWER "<think>\n\n</think>\n\nb" E},
};

static int write(const char *template, const char *messages, const char *more, struct buf *out,
                 struct json_error *e)
{
    char body[1024];
    snprintf(body, sizeof(body), "{\"messages\":[%s]%s}", messages, more);
    json_t *root = json_loads(body, 0, NULL);
    cr_assert_not_null(root, "%s", body);
    buf_init(out);
    int rc = messages_write(template, root, out, e);
    json_decref(root);
    return rc;
}

Test(messages, prompts)
{
    for (size_t i = 0; i < sizeof(prompts) / sizeof(prompts[0]); i++) {
        struct json_error e;
        struct buf out;
        int rc = write(prompts[i].template, prompts[i].messages, prompts[i].more, &out, &e);
        cr_expect(rc == 0, "%zu: %s", i, e.message.text);
        cr_expect(rc != 0 || strcmp(buf_cstr(&out), prompts[i].want) == 0,
                  "%zu, %s %s:\n%s\nfor\n%s", i, prompts[i].messages, prompts[i].more, out.data,
                  prompts[i].want);
        buf_fini(&out);
    }
}

Test(messages, what_a_template_does_that_is_not_done_here)
{
    static const struct {
        const char *template, *messages, *words;
    } rows[] = {
        {"{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}", USER,
         "chat_template is not ChatML"},
        {"", USER, "chat_template is not ChatML"},
        {OLD, USER, "messages[0] is no system message"},
        {"<|im_start|>system\nBe good.<|im_end|>\n{% for m in messages %}", USER,
         "messages[0] is no system message"},
        {Q35, USER ",{\"role\":\"system\",\"content\":\"s\"}",
         "messages[1] is a system message"},
        {Q35, "{\"role\":\"system\",\"content\":\"s\"}," SAYS("a"), "no message of the user"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct json_error e;
        struct buf out;
        int rc = write(rows[i].template, rows[i].messages, "", &out, &e);
        cr_assert(rc == ERR_INVALID && strcmp(e.field, "messages") == 0, "%zu: %d", i, rc);
        cr_expect(strstr(e.message.text, rows[i].words) != NULL, "%zu: %s", i, e.message.text);
        buf_fini(&out);
    }
}
