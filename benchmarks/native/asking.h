/* What the load generator asks for: its options, the trace, and the requests themselves. */
#ifndef BENCH_ASKING_H
#define BENCH_ASKING_H

#include "wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum mode { CLOSED, HOLD, IDLE, TRACE };

static struct {
    int port, clients, requests, chunks, wait;
    double seconds, pause_ms, hold_s, spread_s, limit_s;
    long prompt_bytes;
    const char *key, *trace;
    enum mode mode;
} options = {.port = 0, .clients = 1, .requests = 100, .chunks = 16, .seconds = 60, .pause_ms = 1, .hold_s = 5, .limit_s = 120, .prompt_bytes = 160, .key = "EMPTY"};

static bool option(const char *argument, const char *name, const char **value) {
    size_t size = strlen(name);
    if (strncmp(argument, name, size) || argument[size] != '=') return false;
    *value = argument + size + 1;
    return true;
}

static void read_option(const char *argument) {
    const char *value;
    if (option(argument, "--port", &value)) options.port = atoi(value);
    else if (option(argument, "--clients", &value)) options.clients = atoi(value);
    else if (option(argument, "--requests", &value)) options.requests = atoi(value);
    else if (option(argument, "--chunks", &value)) options.chunks = atoi(value);
    else if (option(argument, "--seconds", &value)) options.seconds = atof(value);
    else if (option(argument, "--pause-ms", &value)) options.pause_ms = atof(value);
    else if (option(argument, "--hold-s", &value)) options.hold_s = atof(value);
    else if (option(argument, "--spread-s", &value)) options.spread_s = atof(value);
    else if (option(argument, "--limit-s", &value)) options.limit_s = atof(value);
    else if (option(argument, "--prompt-bytes", &value)) options.prompt_bytes = atol(value);
    else if (option(argument, "--key", &value)) options.key = value;
    else if (option(argument, "--trace", &value)) options.trace = value;
    else if (option(argument, "--wait", &value)) options.wait = atoi(value);
    else if (!strcmp(argument, "--mode=closed")) options.mode = CLOSED;
    else if (!strcmp(argument, "--mode=hold")) options.mode = HOLD;
    else if (!strcmp(argument, "--mode=idle")) options.mode = IDLE;
    else if (!strcmp(argument, "--mode=trace")) options.mode = TRACE;
    else fprintf(stderr, "load: what is %s?\n", argument), exit(2);
}

/* The trace. */

struct planned { /* `trace` */
    int64_t at;
    long prompt_bytes;
    int chunks;
};

static struct planned *plan;
static int planned_count;

/* Returns the size of the longest prompt. */
static long read_trace(const char *path) {
    FILE *file = fopen(path, "r");
    long long at;
    long prompt_bytes, longest = 0;
    int chunks;
    if (!file) perror(path), exit(2);
    while (fscanf(file, "%lld %ld %d", &at, &prompt_bytes, &chunks) == 3) {
        if (!(planned_count & (planned_count + 1))) plan = realloc(plan, sizeof *plan * 2 * (size_t)(planned_count + 1));
        if (!plan) abort();
        plan[planned_count++] = (struct planned){at * 1000, prompt_bytes, chunks};
        if (prompt_bytes > longest) longest = prompt_bytes;
    }
    fclose(file);
    return longest;
}

/* Requests. */

static char *prompt; /* requests take its first bytes */

static void make_prompt(long size) {
    static const char *words[] = {"the", "model", "answers", "slowly", "when", "its", "queue", "is", "long", "and", "nobody", "waits", "for", "a", "token"};
    prompt = malloc((size_t)size + 32);
    if (!prompt) abort();
    uint32_t seed = 1;
    for (long at = 0, column = 0; at < size;) {
        seed = seed * 1664525u + 1013904223u;
        at += sprintf(prompt + at, "%s%s", words[(seed >> 16) % 15], column > 70 ? ".\\n" : " ");
        column = column > 70 ? 0 : column + 6;
    }
}

static char *make_request(int chunks, long prompt_bytes, size_t *size) {
    char marker[64], body_head[512], head[1024];
    while (prompt_bytes && prompt[prompt_bytes - 1] == '\\') prompt_bytes--; /* never half an escape */
    snprintf(marker, sizeof marker, "chunks=%d,pause_ms=%g", chunks, options.pause_ms);
    int body_size = snprintf(body_head, sizeof body_head,
                             "{\"messages\":[{\"role\":\"system\",\"content\":\"You are a helpful assistant. x-bench: %s\"},"
                             "{\"role\":\"user\",\"content\":\"", marker);
    const char *tail = chunks ? "\"}],\"model\":\"m\",\"stream\":true}" : "\"}],\"model\":\"m\"}";
    size_t length = (size_t)body_size + (size_t)prompt_bytes + strlen(tail);
    int head_size = snprintf(head, sizeof head,
                             "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
                             "user-agent: OpenAI/Python 2.54.0\r\naccept: application/json\r\naccept-encoding: gzip, deflate\r\n"
                             "authorization: Bearer %s\r\nx-stainless-lang: python\r\nx-stainless-retry-count: 0\r\n"
                             "x-bench: %s\r\nconnection: keep-alive\r\ncontent-length: %zu\r\n\r\n",
                             options.port, options.key, marker, length);
    char *request = malloc((size_t)head_size + length + 1), *end = request;
    if (!request) abort();
    end = mempcpy(end, head, (size_t)head_size);
    end = mempcpy(end, body_head, (size_t)body_size);
    end = mempcpy(end, prompt, (size_t)prompt_bytes);
    end = mempcpy(end, tail, strlen(tail));
    *size = (size_t)(end - request);
    return request;
}

#endif
