/* A model server that costs next to nothing, so that it is never the bottleneck of a benchmark.
 *
 *     upstream PORT
 *
 * POST: a canned answer. `x-bench: chunks=16,pause_ms=1` chooses a stream of 16 chunks, one each millisecond by an
 * absolute schedule, the first at once; chunks=0 a plain answer. It is read from the header, or, for proxies that pass
 * on no header they do not know, from the beginning of the body (the load generator says it in the first message).
 * GET: /health, /v1/models; anything else 404. One thread, epoll, one timer for all streams. upstream.py is the same
 * in Python, for machines without a compiler. */
#define _GNU_SOURCE
#include "wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define MAX_CONNECTIONS 65536
#define MAX_HEAD 16384
#define MAX_SEEN 2048 /* of a body: where a proxy that drops our header leaves the marker */
#define MAX_UNSENT (8 << 20)

#define EVENT(content, finish)                                                                                         \
    "data: {\"id\":\"chatcmpl-8f14e45fceea167a5a36dedd4bea2543\",\"object\":\"chat.completion.chunk\","                \
    "\"created\":1700000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"" content "\"},"        \
    "\"logprobs\":null,\"finish_reason\":" finish ",\"token_ids\":null}]}\n\n"
#define WORDS "word word word word word word word word word word "
#define STREAM_HEAD                                                                                                    \
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
#define END "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
#define MODELS "{\"object\": \"list\", \"data\": [{\"id\": \"m\", \"object\": \"model\", \"created\": 1, \"owned_by\": \"bench\"}]}"
#define PLAIN                                                                                                          \
    "{\"id\": \"chatcmpl-1\", \"object\": \"chat.completion\", \"created\": 1, \"model\": \"m\", \"choices\": "        \
    "[{\"index\": 0, \"message\": {\"role\": \"assistant\", \"content\": \"" WORDS WORDS WORDS WORDS "\"}, "           \
    "\"finish_reason\": \"stop\"}], \"usage\": {\"prompt_tokens\": 10, \"completion_tokens\": 40, "                    \
    "\"total_tokens\": 50}}"

enum state { READING_HEAD, READING_BODY, STREAMING };

struct connection {
    int fd;
    enum state state;
    bool is_chunked, closes;
    struct chunked chunked;
    uint64_t body_left;
    size_t head_size, seen_size;
    int heap_index; /* -1: not in the heap */
    long chunks_left;
    int64_t pause, due;
    char *unsent;
    size_t unsent_size;
    char head[MAX_HEAD + 1], seen[MAX_SEEN + 1];
};

static struct connection *connections[MAX_CONNECTIONS];
static struct connection *heap[MAX_CONNECTIONS]; /* streams, the next one due first */
static int heap_size, epoll_fd, timer_fd;
static int64_t timer_set_for;
/* Several chunks in turn: LiteLLM ends a stream that repeats one chunk a hundred times. */
#define TOKENS 4
static const char *token_events[TOKENS] = {EVENT(" word", "null"), EVENT(" text", "null"), EVENT(" line", "null"), EVENT(" page", "null")};
static char token[TOKENS][512], first[1024], last[1024], only[1536];
static size_t token_size, first_size, last_size, only_size; /* all tokens are of one size */

/* The heap of due times. */

static void heap_put(int index, struct connection *c) {
    heap[index] = c;
    c->heap_index = index;
}

static void heap_settle(int index) {
    struct connection *c = heap[index];
    while (index > 0 && heap[(index - 1) / 2]->due > c->due) {
        heap_put(index, heap[(index - 1) / 2]);
        index = (index - 1) / 2;
    }
    for (int child; (child = 2 * index + 1) < heap_size; index = child) {
        if (child + 1 < heap_size && heap[child + 1]->due < heap[child]->due) child++;
        if (heap[child]->due >= c->due) break;
        heap_put(index, heap[child]);
    }
    heap_put(index, c);
}

static void heap_add(struct connection *c) {
    heap_put(heap_size++, c);
    heap_settle(c->heap_index);
}

static void heap_remove(struct connection *c) {
    int index = c->heap_index;
    c->heap_index = -1;
    if (index == --heap_size) return;
    heap_put(index, heap[heap_size]);
    heap_settle(index);
}

static void set_timer(void) {
    int64_t due = heap_size ? heap[0]->due : 0;
    if (due == timer_set_for) return;
    timer_set_for = due;
    struct itimerspec when = {.it_value = {.tv_sec = due / NS_PER_S, .tv_nsec = due % NS_PER_S}};
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
}

/* Connections. */

static void drop(struct connection *c) {
    if (c->heap_index >= 0) heap_remove(c);
    connections[c->fd] = NULL;
    close(c->fd);
    free(c->unsent);
    free(c);
}

static void watch(struct connection *c, uint32_t events) {
    struct epoll_event event = {.events = events, .data.fd = c->fd};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
}

/* False when the peer is gone or takes nothing. */
static bool say(struct connection *c, const char *data, size_t size) {
    if (!c->unsent_size) {
        ssize_t sent = send(c->fd, data, size, MSG_NOSIGNAL);
        if (sent == (ssize_t)size) return true;
        if (sent < 0 && errno != EAGAIN) return false;
        if (sent > 0) data += sent, size -= (size_t)sent;
        watch(c, EPOLLIN | EPOLLOUT);
    }
    char *more = c->unsent_size + size > MAX_UNSENT ? NULL : realloc(c->unsent, c->unsent_size + size);
    if (!more) return false;
    c->unsent = more;
    memcpy(more + c->unsent_size, data, size);
    c->unsent_size += size;
    return true;
}

static bool say_rest(struct connection *c) {
    ssize_t sent = send(c->fd, c->unsent, c->unsent_size, MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN;
    c->unsent_size -= (size_t)sent;
    memmove(c->unsent, c->unsent + sent, c->unsent_size);
    if (!c->unsent_size) watch(c, EPOLLIN);
    return true;
}

static bool say_body(struct connection *c, const char *status, const char *body, bool with_body) {
    char answer[2048];
    int size = snprintf(answer, sizeof answer, "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                        status, strlen(body), with_body ? body : "");
    return say(c, answer, (size_t)size) && !c->closes;
}

static bool start_stream(struct connection *c, long chunks, double pause_ms) {
    if (chunks == 1) return say(c, only, only_size) && !c->closes;
    c->state = STREAMING;
    c->chunks_left = chunks - 1;
    c->pause = (int64_t)(pause_ms * NS_PER_MS);
    c->due = now_ns() + c->pause;
    heap_add(c);
    return say(c, first, first_size);
}

/* False: to be dropped. */
static bool continue_stream(struct connection *c) {
    if (--c->chunks_left) {
        c->due += c->pause;
        heap_settle(c->heap_index);
        return say(c, token[c->chunks_left % TOKENS], token_size);
    }
    heap_remove(c);
    c->state = READING_HEAD;
    return say(c, last, last_size) && !c->closes;
}

/* Requests. */

static bool answer(struct connection *c) {
    c->state = READING_HEAD;
    c->head_size = 0; /* the head's text stays readable until the next read */
    if (strncmp(c->head, "POST ", 5)) {
        bool with_body = strncmp(c->head, "HEAD ", 5);
        const char *path = strchr(c->head, ' ');
        if (path && !strncmp(path, " /health ", 9)) return say_body(c, "200 OK", "{}", with_body);
        if (path && !strncmp(path, " /v1/models ", 12)) return say_body(c, "200 OK", MODELS, with_body);
        return say_body(c, "404 Not Found", "{\"error\": {\"message\": \"not served\"}}", with_body);
    }
    long chunks = 0;
    double pause_ms = 1;
    const char *marker = strcasestr(c->head, "\r\nx-bench:");
    if (!marker) marker = strcasestr(c->seen, "x-bench:");
    if (marker && (marker = strstr(marker, "chunks="))) sscanf(marker, "chunks=%ld,pause_ms=%lf", &chunks, &pause_ms);
    else if (strstr(c->seen, "\"stream\": true") || strstr(c->seen, "\"stream\":true")) chunks = 16;
    return chunks > 0 ? start_stream(c, chunks, pause_ms) : say_body(c, "200 OK", PLAIN, true);
}

static void begin_body(struct connection *c) {
    const char *length = strcasestr(c->head, "\r\ncontent-length:");
    c->is_chunked = strcasestr(c->head, "\r\ntransfer-encoding: chunked") != NULL;
    c->closes = strcasestr(c->head, "\r\nconnection: close") != NULL || strstr(c->head, " HTTP/1.0\r\n") != NULL;
    c->body_left = length ? strtoull(length + 17, NULL, 10) : 0;
    c->chunked = (struct chunked){0};
    c->seen_size = 0;
    c->seen[0] = 0;
    c->state = READING_BODY;
}

static void remember(struct connection *c, const char *data, size_t size) {
    if (size > MAX_SEEN - c->seen_size) size = MAX_SEEN - c->seen_size;
    memcpy(c->seen + c->seen_size, data, size);
    c->seen_size += size;
    c->seen[c->seen_size] = 0;
}

static bool body_is_complete(const struct connection *c) {
    return c->is_chunked ? c->chunked.state == CHUNKED_DONE : c->body_left == 0;
}

/* Takes what arrived. False: to be dropped. */
static bool feed(struct connection *c, const char *data, size_t size) {
    while (size) {
        size_t used;
        if (c->state == STREAMING) return false; /* nobody pipelines here */
        if (c->state == READING_HEAD) {
            size_t before = c->head_size, take = size < MAX_HEAD - before ? size : MAX_HEAD - before;
            memcpy(c->head + before, data, take);
            c->head[before + take] = 0;
            char *end = strstr(c->head + (before > 3 ? before - 3 : 0), "\r\n\r\n");
            c->head_size += take;
            if (!end) {
                if (take < size) return false;
                return true;
            }
            end[2] = 0;
            used = (size_t)(end + 4 - c->head) - before;
            begin_body(c);
        } else if (c->is_chunked) {
            const char *piece = data;
            size_t length;
            used = chunked_next(&c->chunked, data, size, &piece, &length);
            if (c->chunked.state == CHUNKED_BAD) return false;
            remember(c, piece, length);
        } else {
            used = size < c->body_left ? size : (size_t)c->body_left;
            remember(c, data, used);
            c->body_left -= used;
        }
        data += used, size -= used;
        if (c->state == READING_BODY && body_is_complete(c) && !answer(c)) return false;
    }
    return true;
}

static void accept_all(int listening) {
    for (int fd; (fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        struct connection *c = fd < MAX_CONNECTIONS ? malloc(sizeof *c) : NULL;
        if (!c) {
            close(fd);
            continue;
        }
        memset(c, 0, offsetof(struct connection, head));
        c->head[0] = c->seen[0] = 0;
        c->fd = fd;
        c->heap_index = -1;
        connections[fd] = c;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

static void serve(struct connection *c, uint32_t events) {
    static char buffer[262144];
    bool is_kept = true;
    if (events & EPOLLOUT && c->unsent_size) is_kept = say_rest(c);
    if (is_kept && events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        ssize_t size = recv(c->fd, buffer, sizeof buffer, 0);
        if (size > 0) is_kept = feed(c, buffer, (size_t)size);
        else is_kept = size < 0 && errno == EAGAIN;
    }
    if (!is_kept) drop(c);
}

static void run_streams(void) {
    uint64_t expirations;
    if (read(timer_fd, &expirations, sizeof expirations) < 0 && errno != EAGAIN) exit(1);
    for (int64_t now = now_ns(); heap_size && heap[0]->due <= now;) {
        struct connection *c = heap[0];
        if (!continue_stream(c)) drop(c);
    }
    timer_set_for = 0;
}

static size_t frame(char *out, const char *head, const char *event, const char *tail) {
    return (size_t)sprintf(out, "%s%zx\r\n%s\r\n%s", head, strlen(event), event, tail);
}

static int listen_on(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 4096)) {
        perror("upstream");
        exit(1);
    }
    return fd;
}

int main(int count, char **arguments) {
    if (count != 2) return fprintf(stderr, "usage: upstream PORT\n"), 2;
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* never outlives the benchmark */
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    for (int i = 0; i < TOKENS; i++) token_size = frame(token[i], "", token_events[i], "");
    first_size = frame(first, STREAM_HEAD, EVENT(" word", "null"), "");
    last_size = frame(last, "", EVENT("", "\"stop\""), END);
    only_size = frame(only, STREAM_HEAD, EVENT("", "\"stop\""), END);
    int listening = listen_on(atoi(arguments[1]));
    epoll_fd = epoll_create1(0);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listening, &(struct epoll_event){.events = EPOLLIN, .data.fd = listening});
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &(struct epoll_event){.events = EPOLLIN, .data.fd = timer_fd});
    for (;;) {
        struct epoll_event events[512];
        set_timer();
        int ready = epoll_wait(epoll_fd, events, 512, -1);
        for (int i = 0; i < ready; i++) {
            int fd = events[i].data.fd;
            if (fd == listening) accept_all(fd);
            else if (fd == timer_fd) run_streams();
            else if (connections[fd]) serve(connections[fd], events[i].events);
        }
    }
}
