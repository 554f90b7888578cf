/* POST /v1/completions over real sockets, with a stub for the engine: shapes, groups of
 * requests, stop strings, refusals by name. */
#include <signal.h>

#include "api_stub.h"

/* The answer's body holds each of the texts, NULL at the end. */
static void holds(struct server *s, const char *body, const char *what,
                  const char *const *texts)
{
    struct answer a = complete(s, body);
    CHECK(a.status == 200, "%s: %d", what, a.status);
    for (; *texts; texts++)
        CHECK(a.body && strstr(a.body, *texts), "%s: has %s in %s", what, *texts, a.body);
    answer_free(&a);
}

#define HOLDS(s, body, what, ...) holds(s, body, what, (const char *const[]){__VA_ARGS__, NULL})

static void test_shapes(void)
{
    struct server *s = server_start(NULL);
    /* What lm-evaluation-harness sends: the numbers of each list, one choice for each. */
    HOLDS(s,
          "{\"model\":\"stub-model\",\"prompt\":[[5,6,7],[8,9]],\"temperature\":0,"
          "\"max_tokens\":1,\"logprobs\":1,\"seed\":1234,\"echo\":true}",
          "two lists of ids", "\"object\": \"text_completion\"", "\"id\": \"cmpl-pf-",
          "{\"index\": 0, \"text\": \"&'(", "\"text_offset\": [0, 1, 2, 3]",
          "\"token_logprobs\": [null, -0.5, -1, -0.125]", "{\"index\": 1, \"text\": \")*",
          "\"token_logprobs\": [null, -0.5, -0.125]", "\"finish_reason\": \"length\"",
          "\"usage\": {\"prompt_tokens\": 5, \"total_tokens\": 7, \"completion_tokens\": 2, "
          "\"prompt_tokens_details\": {\"cached_tokens\": 0}}");
    HOLDS(s,
          "{\"prompt\":[5,6],\"max_tokens\":2,\"logprobs\":2,\"return_token_ids\":true,"
          "\"return_tokens_as_token_ids\":true}",
          "ids as tokens", "\"tokens\": [\"token_id:300\", \"token_id:301\"]",
          "\"top_logprobs\": [{\"token_id:300\": -0.125, \"token_id:301\": -0.25}, "
          "{\"token_id:301\": -0.25, \"token_id:302\": -0.375}]",
          "\"prompt_token_ids\": [5, 6], \"token_ids\": [300, 301]");
    HOLDS(s, "{\"prompt\":\"And God said\",\"max_tokens\":0,\"echo\":true,\"logprobs\":0}",
          "scores only", "\"text\": \"And God said\"",
          "\"tokens\": [\"And\", \" God\", \" said\"]", "\"text_offset\": [0, 3, 7]",
          "{\" God\": -0.5}", "\"completion_tokens\": 0");
    HOLDS(s, "{\"prompt\":[\"And\",\"God\"],\"n\":2,\"max_tokens\":1}", "two of each",
          "\"index\": 3", "\"prompt_tokens\": 3, \"total_tokens\": 7");
    HOLDS(s, "{\"prompt\":[5,6,7],\"prompt_logprobs\":2,\"max_tokens\":1}", "vLLM's own",
          "\"prompt_logprobs\": [null, {\"6\": {\"logprob\": -0.5, \"rank\": null, "
          "\"decoded_token\": \"'\"}, \"7\": {\"logprob\": -0, \"rank\": 1, \"decoded_token\": "
          "\"(\"}, \"8\": {\"logprob\": -1, \"rank\": 2",
          "{\"7\": {\"logprob\": -1, \"rank\": 1, \"decoded_token\": \"(\"}, \"8\":");
    HOLDS(s, "{\"prompt\":[5,6,7,8],\"truncate_prompt_tokens\":2,\"return_token_ids\":true}",
          "the end is kept", "\"prompt_token_ids\": [7, 8]");
    char long_prompt[1024] = "{\"prompt\":[1";
    for (int i = 0; i < 120; i++)
        strcat(long_prompt, ",2");
    strcat(long_prompt, "],\"truncate_prompt_tokens\":-1,\"max_tokens\":6}");
    HOLDS(s, long_prompt, "what fits with max_tokens", "\"prompt_tokens\": 95");
    HOLDS(s,
          "{\"prompt\":[5,6,7,8],\"truncate_prompt_tokens\":2,\"truncation_side\":\"right\","
          "\"return_token_ids\":true}",
          "the start is kept", "\"prompt_token_ids\": [5, 6]");
    HOLDS(
        s,
        "{\"prompt\":[1],\"kv_transfer_params\":{\"do_remote_decode\":true},\"max_tokens\":1}",
        "a sidecar", "\"kv_transfer_params\": {\"do_remote_prefill\": false");
    struct answer a = complete(s, "{\"prompt\":[1],\"max_tokens\":1,\"no_such_field\":\"x\"}");
    CHECK(a.status == 200 && answer_has(&a, "X-Prefilld-Ignored", "no_such_field"), "ignored");
    answer_free(&a);
    server_stop(s);
}

/* Where a text ends, and numbers of tokens asked for. */
static void test_ids_asked_for(void)
{
    struct server *s = server_start(NULL);
    HOLDS(
        s,
        "{\"prompt\":[1],\"max_tokens\":3,\"stop_token_ids\":[301],\"return_token_ids\":true}",
        "a stop token", "\"finish_reason\": \"stop\", \"stop_reason\": 301",
        "\"token_ids\": [300, 301]");
    HOLDS(s,
          "{\"prompt\":[1],\"max_tokens\":3,\"stop_token_ids\":[300],\"min_tokens\":1,"
          "\"return_token_ids\":true}",
          "not before min_tokens", "\"token_ids\": [300, 301, 302]");
    /* Labels stand where candidates do; the token's own number is first. */
    HOLDS(s,
          "{\"prompt\":[5,6],\"max_tokens\":2,\"logprob_token_ids\":[301,7,301],"
          "\"return_tokens_as_token_ids\":true}",
          "labels",
          "\"top_logprobs\": [{\"token_id:300\": -0.125, \"token_id:301\": -4, "
          "\"token_id:7\": -5}, {\"token_id:301\": -0.25, \"token_id:7\": -5}]");
    HOLDS(s,
          "{\"prompt\":[5,6],\"max_tokens\":1,\"logprob_token_ids\":[7],\"logprobs\":2,"
          "\"echo\":true,\"return_tokens_as_token_ids\":true}",
          "and only behind the prompt",
          "\"top_logprobs\": [null, {\"token_id:6\": -0.5, \"token_id:7\": -0, "
          "\"token_id:8\": -1}, {\"token_id:300\": -0.125, \"token_id:7\": -4}]");
    server_stop(s);
}

/* Tokens 300 to 305, as text. */
static void test_stop(void)
{
    struct server *s = server_start(NULL);
    struct buf text;
    int32_t ids[6];
    char body[512], want[256];
    for (int i = 0; i < 6; i++)
        ids[i] = FIRST_NEW + i;
    buf_init(&text);
    tokenizer_decode(s->tokenizer, ids, 6, true, &text);
    buf_cstr(&text);
    /* From inside the second token to inside the fourth. */
    size_t lens[6], len = 0;
    for (int i = 0; i < 6; i++) {
        size_t n;
        tokenizer_token_bytes(s->tokenizer, ids[i], &n);
        lens[i] = len += n;
    }
    size_t from = lens[0] + 1, to = lens[2] + 1;
    snprintf(body, sizeof(body),
             "{\"prompt\":[1],\"max_tokens\":99,\"stop\":[\"never\",\"%.*s\"],"
             "\"return_token_ids\":true,\"logprobs\":0}",
             (int)(to - from), text.data + from);
    snprintf(want, sizeof(want), "\"text\": \"%.*s\"", (int)from, text.data);
    atomic_store(&s->token_ms, 1);
    HOLDS(s, body, "a stop string", want, "\"finish_reason\": \"stop\", \"stop_reason\": \"",
          "\"token_ids\": [300, 301, 302, 303]", "\"completion_tokens\": 4");
    CHECK(becomes(&s->n_done, 1) && atomic_load(&s->n_cancels) == 1, "the request was ended");
    snprintf(body + strlen(body) - 1, 64, ",\"include_stop_str_in_output\":true}");
    snprintf(want, sizeof(want), "\"text\": \"%.*s\"", (int)to, text.data);
    HOLDS(s, body, "with the string", want);
    CHECK(counted(s, OUTCOME_OK) == 2, "both are ok");
    buf_fini(&text);
    server_stop(s);
}

static const struct {
    const char *field, *says;
} bad[] = {
    {"\"prompt\":7",
     "prompt is an integer; a string, a list of strings or of ids, or a list of lists of ids"},
    {"\"x\":1", "prompt is missing"},
    {"\"prompt\":[]", "prompt is empty"},
    {"\"prompt\":\"\"", "prompt is empty"},
    {"\"prompt\":[\"And\",\"\"]", "prompt[1] is empty"},
    {"\"prompt\":[\"And\",5]", "prompt[1] is an integer"},
    {"\"prompt\":[[1],[]]", "prompt[1] is empty"},
    {"\"prompt\":[[1],5]", "prompt[1] is an integer"},
    {"\"prompt\":[[1],[2,-5]]", "prompt[1][1] is negative"},
    {"\"prompt\":[[1],[2,2100]]", "prompt[1][1] is out of range"},
    {"\"prompt\":[[1],[2,[3]]]", "prompt[1][1] is a list"},
    {"\"prompt\":[1,\"secret\"]", "prompt[1] is a string"},
    {"\"prompt\":[[1],[1],[1],[1],[1],[1],[1],[1],[1]]", "prompt has 9 prompts; at most 8"},
    {"\"prompt\":[1],\"n\":9", "n times the number of prompts is 9; at most 8"},
    {"\"prompt\":[1],\"n\":0", "from 1 to 128"},
    {"\"prompt\":[1],\"n\":-1", "n is out of range"},
    {"\"prompt\":[1],\"best_of\":2", "best_of is another number than n"},
    {"\"prompt\":[1],\"max_tokens\":-1", "max_tokens is out of range"},
    {"\"prompt\":[1],\"max_tokens\":101", "together at most 101"},
    {"\"prompt\":[1],\"logprobs\":true", "logprobs is a boolean"},
    {"\"prompt\":[1],\"logprobs\":\"secret\"", "logprobs is a string"},
    {"\"prompt\":[1],\"logprobs\":21", "from 0 to 20"},
    {"\"prompt\":[1],\"prompt_logprobs\":-1", "from 0 to 20"},
    {"\"prompt\":[1],\"temperature\":-1", "temperature is out of range"},
    {"\"prompt\":[1],\"temperature\":\"secret\"", "temperature is a string"},
    {"\"prompt\":[1],\"top_p\":0", "top_p is 0"},
    {"\"prompt\":[1],\"top_p\":1.5", "top_p is out of range"},
    {"\"prompt\":[1],\"top_k\":0.5", "top_k is a number with a fraction"},
    {"\"prompt\":[1],\"min_p\":2", "min_p"},
    {"\"prompt\":[1],\"presence_penalty\":3", "from -2 to 2"},
    {"\"prompt\":[1],\"repetition_penalty\":0", "repetition_penalty"},
    {"\"prompt\":[1],\"seed\":\"secret\"", "seed is a string"},
    {"\"prompt\":[1],\"logit_bias\":{\"secret\":1}", "no id in [0, 2100)"},
    {"\"prompt\":[1],\"logit_bias\":{\"5\":101}", "from -100 to 100"},
    {"\"prompt\":[1],\"logit_bias\":[5]", "logit_bias is a list"},
    {"\"prompt\":[1],\"stop\":7", "stop is or holds an integer"},
    {"\"prompt\":[1],\"stop\":[\"\"]", "1 to 256 bytes"},
    {"\"prompt\":[1],\"stop_token_ids\":[2100]", "stop_token_ids[0] is out of range"},
    {"\"prompt\":[1],\"stop_token_ids\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]",
     "stop_token_ids has 16 ids; at most 15"},
    {"\"prompt\":[1],\"min_tokens\":5,\"max_tokens\":4", "at most max_tokens, which is 4"},
    {"\"prompt\":[1],\"echo\":1", "echo is an integer"},
    {"\"prompt\":[1],\"suffix\":\"secret\"", "suffix is a string; this version"},
    {"\"prompt\":[1],\"logprob_token_ids\":7", "a list of 1 to 32 ids is accepted"},
    {"\"prompt\":[1],\"logprob_token_ids\":[]", "a list of another length; a list of 1 to 32"},
    {"\"prompt\":[1],\"logprob_token_ids\":[5,2100]",
     "logprob_token_ids[1] is out of range; ids are integers in [0, 2100)"},
    {"\"prompt\":[1],\"logprob_token_ids\":[\"secret\"]", "logprob_token_ids[0] is a string"},
    {"\"prompt\":[1],\"return_progress\":true", "return_progress is true without a stream"},
    {"\"prompt\":[1],\"stream\":true,\"return_progress\":1", "return_progress is an integer"},
    {"\"prompt\":[1],\"response_format\":{\"type\":\"secret\"}", "response_format"},
    {"\"prompt\":[1],\"truncate_prompt_tokens\":0", "truncate_prompt_tokens is 0"},
    {"\"prompt\":[1],\"truncation_side\":\"secret\"", "\\\"left\\\" and \\\"right\\\""},
    {"\"prompt\":[1],\"kv_transfer_params\":5", "kv_transfer_params is an integer"},
};

static void test_refusals(void)
{
    struct server *s = server_start(NULL);
    int n = sizeof(bad) / sizeof(bad[0]);
    for (int i = 0; i < n; i++) {
        char body[512];
        snprintf(body, sizeof(body), "{%s}", bad[i].field);
        struct answer a = complete(s, body);
        CHECK(a.status == 400 && strstr(a.body, bad[i].says) && !strstr(a.body, "secret"),
              "%s: %d %s", body, a.status, a.body);
        answer_free(&a);
    }
    CHECK(counted(s, OUTCOME_INVALID) == n, "each is counted as invalid");
    CHECK(counted(s, OUTCOME_OK) == 0 && queue_n_waiting(s->queue) == 0, "none was queued");
    server_stop(s);
}

/* What penalties touch of the vocabulary is bounded where the backend bounds it. */
static void test_adjustments(void)
{
    struct server *s = server_start(NULL);
    s->api.max_adjust = 20;
    static const struct {
        const char *fields;
        int status;
    } limits[] = {{"\"max_tokens\":18,\"repetition_penalty\":1.5", 200},
                  {"\"max_tokens\":19,\"repetition_penalty\":1.5", 400},
                  {"\"max_tokens\":20,\"presence_penalty\":1", 200},
                  {"\"max_tokens\":21,\"presence_penalty\":1", 400},
                  {"\"max_tokens\":50", 200}};
    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        char body[256];
        snprintf(body, sizeof(body), "{\"prompt\":[1,2],\"ignore_eos\":true,%s}",
                 limits[i].fields);
        struct answer a = complete(s, body);
        CHECK(a.status == limits[i].status, "%s: %d %s", body, a.status, a.body);
        answer_free(&a);
    }
    server_stop(s);
}

/* All or none. */
static void test_full(void)
{
    struct server *s = server_start(NULL);
    char body[] = "{\"prompt\":[[1],[2],[3],[4],[5]],\"max_tokens\":1}";
    char request[256];
    snprintf(request, sizeof(request),
             "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %zu\r\n\r\n%s",
             strlen(body), body);
    freeze(s);
    int fd = client_connect(s->address);
    client_sends(fd, request);
    CHECK(waits_for(s, 5), "five of eight wait");
    struct answer a = complete(s, body);
    CHECK(a.status == 503 && answer_header(&a, "Retry-After"), "five more: %d %s", a.status,
          a.body);
    answer_free(&a);
    CHECK(queue_n_waiting(s->queue) == 5, "none of them waits");
    atomic_store(&s->is_frozen, false);
    a = client_read(fd, 1);
    CHECK(a.status == 200 && strstr(a.body, "\"index\": 4"), "the first five are answered");
    answer_free(&a);
    close(fd);
    CHECK(counted(s, OUTCOME_OK) == 1 && counted(s, OUTCOME_OVERLOAD) == 1, "two calls");
    server_stop(s);
}

static void test_ends(void)
{
    struct server *s = server_start(NULL);
    char body[] = "{\"prompt\":[[1],[2],[3]],\"max_tokens\":50}";
    atomic_store(&s->outcome, OUTCOME_ERROR);
    expect(complete(s, body), 500, "server_error", "one fails, all fail");
    atomic_store(&s->outcome, OUTCOME_DEADLINE);
    expect(complete(s, body), 504, "\"param\": \"deadline_ms\"", "one is late, all are");
    atomic_store(&s->outcome, OUTCOME_OK);
    CHECK(becomes(&s->n_done, 6), "all requests ended: %d", atomic_load(&s->n_done));
    /* A client that goes: before the first token, and in the middle of the text. */
    for (int i = 0; i < 2; i++) {
        atomic_store(&s->n_cancels, 0);
        atomic_store(&s->n_done, 0);
        atomic_store(&s->is_held, i == 0);
        atomic_store(&s->token_ms, 20);
        char request[256];
        snprintf(request, sizeof(request),
                 "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %zu\r\n\r\n%s",
                 strlen(body), body);
        int fd = client_connect(s->address), n_taken = atomic_load(&s->n_taken);
        client_sends(fd, request);
        becomes(&s->n_taken, n_taken + 3);
        client_sleep_ms(60);
        close(fd);
        CHECK(becomes(&s->n_cancels, 3) && becomes(&s->n_done, 3), "hang-up %d: %d cancels", i,
              atomic_load(&s->n_cancels));
        atomic_store(&s->is_held, false);
    }
    for (int i = 0; i < 2000 && counted(s, OUTCOME_CANCELLED) < 2; i++)
        client_sleep_ms(1);
    CHECK(counted(s, OUTCOME_CANCELLED) == 2, "two calls were cancelled");
    server_stop(s);
}

/* ---- its relatives ---- */

/* A call, what its answer says, and with which status. */
#define CHAT(field) "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]," field "}"

static const struct {
    const char *path, *body, *says;
    int status;
} others[] = {
    {"/v1/score", "{\"context\":[5,6],\"continuations\":[[7,8],\"And\"]}",
     "{\"index\": 0, \"tokens\": [7, 8], \"logprob\": -2.5, \"logprobs\": [-1, -1.5], "
     "\"is_greedy\": false}, {\"index\": 1",
     200},
    {"/v1/score", "{\"context\":[5,6],\"continuations\":[[7]],\"top_logprobs\":2}",
     "\"logprobs\": [-1], \"is_greedy\": true, \"top\": [[{\"id\": 7, \"token\": \"(\", "
     "\"logprob\": -0}, {\"id\": 8",
     200},
    {"/v1/score", "{\"context\":[],\"continuations\":[[7]]}", "context is empty", 400},
    {"/v1/score", "{\"context\":[1]}", "continuations is missing", 400},
    {"/v1/score", "{\"context\":[1],\"continuations\":[]}", "continuations has 0 entries", 400},
    {"/v1/score", "{\"context\":[1],\"continuations\":[[]]}", "continuations[0] is empty", 400},
    {"/v1/score", "{\"context\":[1],\"continuations\":[7]}", "continuations[0] is an integer",
     400},
    {"/v1/score", "{\"context\":[[1]],\"continuations\":[[7]]}", "context[0] is a list", 400},
    {"/v1/score", "{\"context\":[1],\"continuations\":[[7],[2100]]}",
     "continuations[1][0] is out of range", 400},
    {"/v1/score", "{\"context\":[1],\"continuations\":[[1],[1],[1],[1],[1],[1],[1],[1],[1]]}",
     "continuations makes 9 prompts; at most 8", 400},
    /* The stub gives -0.5 t at row t: equal for both labels. */
    {"/generative_scoring", "{\"query\":[5],\"items\":[[6],[6,7]],\"label_token_ids\":[8,9]}",
     "\"data\": [{\"index\": 0, \"object\": \"score\", \"score\": 0.5}, {\"index\": 1, "
     "\"object\": \"score\", \"score\": 0.5}], \"usage\": {\"prompt_tokens\": 5",
     200},
    {"/generative_scoring",
     "{\"query\":[5],\"items\":[[6]],\"label_token_ids\":[8,9],\"apply_softmax\":false}",
     "\"score\": 0.3678794411714423", 200}, /* exp(-1) */
    {"/generative_scoring", "{\"query\":\"\",\"items\":[[6]],\"label_token_ids\":[8]}",
     "\"score\": 1}", 200},
    {"/generative_scoring", "{\"query\":[5],\"items\":[\"\"],\"label_token_ids\":[8]}",
     "\"score\": 1}", 200},
    {"/generative_scoring", "{\"query\":[5],\"items\":[[6]]}", "label_token_ids is missing",
     400},
    {"/generative_scoring", "{\"items\":[[6]],\"label_token_ids\":[8]}", "query is missing",
     400},
    {"/generative_scoring", "{\"query\":\"a\",\"items\":\"b\",\"label_token_ids\":[8]}",
     "items is a string; a list is accepted", 400},
    {"/rerank",
     "{\"query\":[5],\"documents\":[\"And God said\",\"And\"],\"label_token_ids\":[8],"
     "\"apply_softmax\":false,\"top_n\":1}",
     "\"results\": [{\"index\": 1, \"relevance_score\": 0.36787944117144233, \"document\": "
     "{\"text\": \"And\"}}]",
     200},
    {"/generate",
     "{\"input_ids\":[5,6,7],\"sampling_params\":{\"max_new_tokens\":1},\"return_logprob\":"
     "true,"
     "\"logprob_start_len\":1,\"top_logprobs_num\":1,\"rid\":\"my-id\"}",
     "\"output_ids\": [300], \"meta_info\": {\"id\": \"my-id\", \"finish_reason\": {\"type\": "
     "\"length\", \"length\": 1}, \"prompt_tokens\": 3, \"completion_tokens\": 1",
     200},
    {"/generate",
     "{\"input_ids\":[[5,6,7]],\"sampling_params\":{\"max_new_tokens\":1},\"return_logprob\":"
     "true,"
     "\"logprob_start_len\":0,\"top_logprobs_num\":1,\"return_text_in_logprobs\":true}",
     "\"input_token_logprobs\": [[null, 5, \"&\"], [-0.5, 6, \"'\"], [-1, 7, \"(\"]], "
     "\"input_top_logprobs\": [null, [[-0, 7, \"(\"]], [[-1, 7, \"(\"]]], "
     "\"output_token_logprobs\": [[-0.125, 300, \" ha\"]]",
     200},
    {"/generate", "{\"text\":[\"And\",\"God\"],\"sampling_params\":{\"max_new_tokens\":1}}",
     "[{\"text\": \" ha\"", 200},
    {"/generate", "{\"text\":\"And\",\"input_ids\":[1]}", "both given", 400},
    {"/generate", "{}", "both missing", 400},
    {"/generate", "{\"text\":[]}", "text is empty; at least one token", 400},
    {"/generate", "{\"text\":[],\"stream\":true}", "text is empty", 400},
    {"/generative_scoring", "{\"query\":\"And\",\"items\":[],\"label_token_ids\":[1]}",
     "items has 0 entries; 1 to 8 are", 400},
    {"/generate", "{\"text\":\"And\",\"stream\":1}", "stream is an integer", 400},
    {"/generate", "{\"text\":\"And\",\"token_ids_logprob\":[1]}", "token_ids_logprob is a list",
     400},
    {"/generate", "{\"text\":\"And\",\"sampling_params\":{\"max_new_tokens\":101}}",
     "max_new_tokens is 101", 400},
    {"/generate", "{\"text\":\"And\",\"sampling_params\":{\"regex\":\"a\"}}", "regex", 400},
    {"/v1/chat/completions",
     "{\"messages\":[{\"role\":\"system\",\"content\":\"And\"},{\"role\":\"user\",\"content\":"
     "[{\"type\":\"text\",\"text\":\"God\"}]}],\"max_tokens\":1,\"return_token_ids\":true}",
     "\"message\": {\"role\": \"assistant\", \"content\": \" ha\"}, \"logprobs\": null, "
     "\"finish_reason\": \"length\"",
     200},
    {"/v1/chat/completions",
     "{\"messages\":[{\"role\":\"user\",\"content\":\"And\"}],\"max_tokens\":1,\"logprobs\":"
     "true}",
     "\"logprobs\": {\"content\": [{\"token\": \" ha\", \"logprob\": -0.125, \"bytes\": [32, "
     "104, 97], \"top_logprobs\": []}]}",
     200},
    {"/v1/chat/completions",
     "{\"messages\":[{\"role\":\"user\",\"content\":\"And\"}],\"max_tokens\":1,"
     "\"logprob_token_ids\":[7,300]}",
     "\"top_logprobs\": [{\"token\": \"(\", \"logprob\": -4, \"bytes\": [40]}, {\"token\": "
     "\" ha\", \"logprob\": -5, \"bytes\": [32, 104, 97]}]}]}",
     200},
    {"/v1/chat/completions", CHAT("\"use_beam_search\":true"), "use_beam_search is ", 400},
    {"/v1/chat/completions", CHAT("\"bad_words\":[\"a\"]"), "bad_words is ", 400},
    {"/v1/chat/completions", CHAT("\"allowed_token_ids\":[1]"), "allowed_token_ids is ", 400},
    {"/v1/chat/completions", CHAT("\"allowed_token_ids\":[]"), "allowed_token_ids is ", 400},
    {"/v1/chat/completions", CHAT("\"bad_words\":[],\"tools\":[],\"guided_json\":{}"),
     "\"object\": \"chat.completion\"", 200},
    {"/v1/completions", "{\"prompt\":\"And\",\"max_tokens\":1,\"bad_words\":[]}",
     "\"object\": \"text_completion\"", 200},
    {"/v1/chat/completions", CHAT("\"prompt_logprobs\":0"), "prompt_logprobs is ", 400},
    {"/v1/chat/completions", CHAT("\"truncate_prompt_tokens\":3"), "truncate_prompt_tokens is ",
     400},
    {"/v1/chat/completions", CHAT("\"return_tokens_as_token_ids\":true"),
     "return_tokens_as_token_ids is ", 400},
    {"/v1/chat/completions", "{\"messages\":[]}", "messages is empty", 400},
    {"/v1/chat/completions", "{}", "messages is missing", 400},
    {"/v1/chat/completions", "{\"messages\":[{\"role\":\"x\",\"content\":\"a\"}]}",
     "messages[0] is no object with a role", 400},
    {"/v1/chat/completions",
     "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image\"}]}]}",
     "messages[0] has a part that is no text", 400},
    {"/v1/chat/completions",
     "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"text\":\"a\"}]}]"
     "}",
     "messages[0] has a part that is no text", 400},
    {"/v1/chat/completions", "{\"messages\":[{\"role\":\"user\",\"contents\":\"a\"}]}",
     "messages[0] has no content", 400},
    {"/v1/chat/completions",
     "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":[{}]}",
     "tools is a list; this version", 400},
    {"/v1/chat/completions",
     "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"top_logprobs\":1}",
     "top_logprobs is given without logprobs", 400},
};

static void test_others(void)
{
    struct server *s = server_start(NULL);
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        struct answer a = ask(s, "POST", others[i].path, others[i].body);
        CHECK(a.status == others[i].status && strstr(a.body, others[i].says), "%s %s: %d %s",
              others[i].path, others[i].body, a.status, a.body);
        answer_free(&a);
    }
    expect(ask(s, "GET", "/v1/models/stub-model", ""), 200, "{\"id\": \"stub-model\"",
           "a model");
    expect(ask(s, "GET", "/v1/models/stub%2dmodel", ""), 200, "stub-model", "by escapes");
    expect(ask(s, "GET", "/v1/models/stub", ""), 404, "served is stub-model", "another model");
    expect(ask(s, "GET", "/v1/models/stub-model2", ""), 404, "not served", "a longer name");
    server_stop(s);
}

/* The prompt of a chat, as text, with a template beside the tokenizer. */
static void chats(struct server *s, const char *template, const char *more, const char *want)
{
    char dir[] = "/tmp/prefilld-chat-XXXXXX", from[512], path[512], body[512];
    const char *src = getenv("SRCDIR");
    struct errmsg e;
    struct buf ids;
    char *here = realpath(src ? src : ".", NULL);
    snprintf(from, sizeof(from), "%s/tests/models/demo/tokenizer.json", here);
    free(here);
    if (!mkdtemp(dir))
        return;
    snprintf(path, sizeof(path), "%s/chat_template.jinja", dir);
    FILE *f = fopen(path, "w");
    fputs(template, f);
    fclose(f);
    snprintf(path, sizeof(path), "%s/tokenizer.json", dir);
    struct tokenizer *t = NULL;
    const struct tokenizer *before = s->api.tokenizer;
    CHECK(symlink(from, path) == 0 && tokenizer_load(path, &t, &e) == 0, "a template");
    s->api.tokenizer = t; /* nothing runs now */
    snprintf(
        body, sizeof(body),
        "{\"messages\":[{\"role\":\"user\",\"content\":\" And \"},{\"role\":\"assistant\","
        "\"content\":\"<think>x</think>\\n\\nGod\"},{\"role\":\"user\",\"content\":\"he\"}],"
        "\"max_tokens\":1,\"return_token_ids\":true%s}",
        more);
    struct answer a = ask(s, "POST", "/v1/chat/completions", body);
    const char *p = a.body ? strstr(a.body, "\"prompt_token_ids\": [") : NULL;
    buf_init(&ids);
    for (p = p ? p + 21 : ""; *p == ' ' || *p == ',' || (*p >= '0' && *p <= '9');) {
        int32_t id = (int32_t)strtol(p + (*p == ','), (char **)&p, 10);
        buf_add(&ids, &id, sizeof(id));
    }
    struct buf text;
    buf_init(&text);
    tokenizer_decode(t, (int32_t *)(void *)ids.data, ids.len / sizeof(int32_t), false, &text);
    CHECK(buf_cstr(&text) && strcmp(text.data, want) == 0, "%s %s: %s", template, more,
          text.data);
    answer_free(&a);
    buf_fini(&ids);
    buf_fini(&text);
    s->api.tokenizer = before;
    tokenizer_free(t);
    unlink(path);
    snprintf(path, sizeof(path), "%s/chat_template.jinja", dir);
    unlink(path);
    rmdir(dir);
}

/* The ends of the templates of Qwen3-Next-Instruct, of a large and of a small Qwen3.5. */
static void test_templates(void)
{
    static const char off[] = ",\"chat_template_kwargs\":{\"enable_thinking\":false}";
    static const char on[] = ",\"chat_template_kwargs\":{\"enable_thinking\":true}";
    static const char plain[] =
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}";
    static const char large[] =
        "{%- set content = render_content(message.content, true)|trim "
        "%}content.split('</think>')"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if "
        "enable_thinking is "
        "defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}"
        "{{- '<think>\\n' }}";
    static const char small[] =
        "{%- set content = render_content(message.content, true)|trim "
        "%}content.split('</think>')"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if "
        "enable_thinking is "
        "defined and enable_thinking is true %}{{- '<think>\\n' }}{%- else %}"
        "{{- '<think>\\n\\n</think>\\n\\n' }}";
#define CUT                                                                                    \
    "<|im_start|>user\nAnd<|im_end|>\n<|im_start|>assistant\nGod<|im_end|>\n<|im_start|>"      \
    "user\nhe"                                                                                 \
    "<|im_end|>\n<|im_start|>assistant\n"
    struct server *s = server_start(NULL);
    chats(s, plain, "",
          "<|im_start|>user\n And <|im_end|>\n<|im_start|>assistant\n<think>x</think>\n\nGod"
          "<|im_end|>\n<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n");
    chats(s, large, "", CUT "<think>\n");
    chats(s, large, off, CUT "<think>\n\n</think>\n\n");
    chats(s, small, "", CUT "<think>\n\n</think>\n\n");
    chats(s, small, on, CUT "<think>\n");
    server_stop(s);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    log_init(LOG_LEVEL_ERROR, NULL);
    test_shapes();
    test_ids_asked_for();
    test_stop();
    test_refusals();
    test_adjustments();
    test_full();
    test_ends();
    test_others();
    test_templates();
    return tap_done();
}
