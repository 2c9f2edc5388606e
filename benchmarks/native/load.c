/* A load generator that reads streams event by event. Run by the benchmark; prints one JSON object.
 *
 *     load --port=8080 [--mode=closed] [--clients=16] [--requests=1000] [--seconds=10] [--chunks=16] …
 *
 * closed  each client asks, reads to the end and asks again, until `requests` or `seconds` are used up
 * hold    each client opens one stream; when all have begun, they are watched for `hold-s`, then left
 * idle    each client asks once for a plain answer, then keeps its connection open and idle for `hold-s`
 * trace   requests at the times of a file with lines `offset_us prompt_bytes chunks`; late ones count from when they
 *         were due, so that a slow server cannot hide its queue
 *
 * A time is read after every read from a socket. An event is complete at its blank line; those that arrived in one
 * read have a gap of 0 and are counted as coalesced. In `hold` and `idle` a line `{"mark": "open"}` is printed when all
 * is open and `{"mark": "held"}` when the time is over; with --wait=1 a byte on stdin lets it go on after each. */
#define _GNU_SOURCE
#include "asking.h"
#include "series.h"
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

#define MAX_HEAD 4096
#define TICK (10 * NS_PER_MS) /* how often our own lateness is looked at */
#define OPENING_AT_ONCE 64    /* `idle`: first requests under way at one time */

enum state { UNUSED, CONNECTING, RESTING, READING_HEAD, READING_BODY, GONE };
enum failure { NO_CONNECTION, BAD_STATUS, CUT_SHORT, WRONG_EVENTS, BAD_BYTES, TIMED_OUT, FAILURES };
static const char *failure_names[] = {"no_connection", "bad_status", "cut_short", "wrong_events", "bad_bytes", "timed_out"};

struct client {
    int fd;
    enum state state;
    bool is_chunked, has_length, closes, saw_done, line_is_blank;
    int expected, events; /* chunks */
    int64_t asked, previous;
    uint64_t left;
    struct chunked chunked;
    char *request; /* `trace`: its own; else the one that all share */
    size_t request_size, sent, head_size, start_size;
    char start[16]; /* of the event being read */
    char head[MAX_HEAD + 1];
};

static struct series ttft, gaps, e2e, lags, lates;
static struct client *clients, **resting;
static int resting_count, room_for_clients;
static long failures[FAILURES], requests_left, done_count, events, reads_with_events, coalesced, reconnects, opened, ended;
static long under_way, begun;
static int64_t started, next_tick, window_started, window_ended;
static long window_events;
static int epoll_fd, timer_fd;
static char *shared_request;
static size_t shared_request_size;
static enum { OPENING, WAITING_TO_HOLD, HOLDING, WAITING_TO_END, FINISHED } phase;

/* Clients. */

static void watch(struct client *c, int operation, uint32_t what) {
    struct epoll_event event = {.events = what, .data.ptr = c};
    epoll_ctl(epoll_fd, operation, c->fd, &event);
}

static void hang_up(struct client *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

static void go_on(struct client *c);

static void end_request(struct client *c) {
    ended++, under_way--;
    if (c->request != shared_request) free(c->request);
    c->request = NULL;
    go_on(c);
}

static void fail(struct client *c, enum failure kind) {
    failures[kind]++;
    hang_up(c);
    c->state = kind == NO_CONNECTION && options.mode == CLOSED ? GONE : UNUSED; /* nobody hammers a closed door */
    end_request(c);
}

static bool is_asking(const struct client *c) {
    return c->state == CONNECTING || c->state == READING_HEAD || c->state == READING_BODY;
}

static void send_rest(struct client *c) {
    ssize_t sent = send(c->fd, c->request + c->sent, c->request_size - c->sent, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) {
        fail(c, CUT_SHORT);
        return;
    }
    if (sent > 0) c->sent += (size_t)sent;
    watch(c, EPOLL_CTL_MOD, c->sent < c->request_size ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

static void ask(struct client *c, int64_t due) {
    under_way++;
    c->asked = due;
    c->sent = c->head_size = c->start_size = 0;
    c->events = 0;
    c->saw_done = false;
    c->line_is_blank = true;
    if (c->fd >= 0) {
        c->state = READING_HEAD;
        send_rest(c);
        return;
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)options.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (c->fd < 0 || (connect(c->fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS)) {
        fail(c, NO_CONNECTION);
        return;
    }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    c->state = CONNECTING;
    watch(c, EPOLL_CTL_ADD, EPOLLOUT);
}

/* What `closed` does next; in the other modes a client rests, or is done. */
static void go_on(struct client *c) {
    if (c->state == GONE) return;
    if (options.mode == CLOSED && requests_left > 0 && now_ns() - started < options.seconds * NS_PER_S) {
        requests_left--;
        c->request = shared_request;
        ask(c, now_ns());
    } else if (options.mode == CLOSED) {
        hang_up(c);
        c->state = GONE;
    } else if (c->state != UNUSED) {
        c->state = RESTING;
        resting[resting_count++] = c;
    }
}

static void finish(struct client *c, int64_t now) {
    if (c->expected && (!c->saw_done || c->events != c->expected)) {
        fail(c, WRONG_EVENTS);
        return;
    }
    add(&e2e, now - c->asked);
    done_count++;
    c->state = READING_BODY;
    if (c->closes) {
        hang_up(c);
        reconnects++;
        c->state = options.mode == CLOSED ? READING_BODY : UNUSED;
    }
    end_request(c);
}

static void on_event(struct client *c, int64_t now, int *in_this_read) {
    if (c->start_size < 5 || memcmp(c->start, "data:", 5)) return; /* a comment, or a field that is no data */
    if (c->start_size >= 12 && !memcmp(c->start, "data: [DONE]", 12)) {
        c->saw_done = true;
        return;
    }
    if (c->events++) add(&gaps, now - c->previous);
    else {
        add(&ttft, now - c->asked);
        begun++;
    }
    c->previous = now;
    events++;
    if (phase == HOLDING) window_events++;
    if ((*in_this_read)++) coalesced++;
}

static void read_events(struct client *c, const char *data, size_t size, int64_t now, int *in_this_read) {
    for (size_t at = 0; at < size;) {
        const char *newline = memchr(data + at, '\n', size - at);
        size_t stop = newline ? (size_t)(newline - data) : size;
        if (stop > at && !(stop == at + 1 && data[at] == '\r')) {
            size_t room = sizeof c->start - c->start_size, take = stop - at < room ? stop - at : room;
            memcpy(c->start + c->start_size, data + at, take);
            c->start_size += take;
            c->line_is_blank = false;
        }
        at = stop + 1;
        if (!newline) return;
        if (c->line_is_blank) {
            on_event(c, now, in_this_read);
            c->start_size = 0;
        }
        c->line_is_blank = true;
    }
}

/* True when the head is there; `used` bytes belong to it. */
static bool read_head(struct client *c, const char *data, size_t size, size_t *used) {
    size_t before = c->head_size, take = size < MAX_HEAD - before ? size : MAX_HEAD - before;
    memcpy(c->head + before, data, take);
    c->head[before + take] = 0;
    char *end = strstr(c->head + (before > 3 ? before - 3 : 0), "\r\n\r\n");
    c->head_size += take;
    if (!end) return false;
    end[2] = 0;
    *used = (size_t)(end + 4 - c->head) - before;
    const char *length = strcasestr(c->head, "\r\ncontent-length:");
    c->is_chunked = strcasestr(c->head, "\r\ntransfer-encoding: chunked") != NULL;
    c->has_length = length != NULL;
    c->left = length ? strtoull(length + 17, NULL, 10) : 0;
    c->closes = strcasestr(c->head, "\r\nconnection: close") != NULL;
    c->chunked = (struct chunked){0};
    c->state = READING_BODY;
    return true;
}

static void take_bytes(struct client *c, const char *data, size_t size, int64_t now) {
    int in_this_read = 0;
    bool is_complete = false;
    if (c->state == READING_HEAD) {
        size_t used;
        if (!read_head(c, data, size, &used)) {
            if (c->head_size == MAX_HEAD) fail(c, BAD_BYTES);
            return;
        }
        data += used, size -= used;
        if (strncmp(c->head, "HTTP/1.1 200", 12)) {
            if (!failures[BAD_STATUS]) fprintf(stderr, "%.200s\n%.*s\n", c->head, (int)(size < 300 ? size : 300), data);
            fail(c, BAD_STATUS);
            return;
        }
        is_complete = c->has_length && !c->left;
    }
    while (size && !is_complete) {
        const char *piece = data;
        size_t length = size, used = size;
        if (c->is_chunked) {
            used = chunked_next(&c->chunked, data, size, &piece, &length);
            is_complete = c->chunked.state == CHUNKED_DONE;
        } else if (c->has_length) {
            used = length = size < c->left ? size : (size_t)c->left;
            is_complete = !(c->left -= used);
        }
        if (c->expected) read_events(c, piece, length, now, &in_this_read);
        data += used, size -= used;
        if (c->chunked.state == CHUNKED_BAD) break;
    }
    if (in_this_read) reads_with_events++;
    if (size) fail(c, BAD_BYTES);
    else if (is_complete) finish(c, now);
}

static void end_of_input(struct client *c, int64_t now) {
    if (c->state == RESTING) { /* an idle connection may be closed by its server */
        hang_up(c);
        c->state = UNUSED;
        for (int i = 0; i < resting_count; i++)
            if (resting[i] == c) resting[i--] = resting[--resting_count];
        return;
    }
    if (c->state == READING_BODY && !c->is_chunked && !c->has_length) {
        c->closes = true;
        finish(c, now);
    } else {
        fail(c, c->state == CONNECTING ? NO_CONNECTION : CUT_SHORT);
    }
}

static void serve(struct client *c, uint32_t what) {
    static char buffer[262144];
    if (c->fd < 0) return;
    if (c->state == CONNECTING) {
        int error = 0;
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &(socklen_t){sizeof error});
        if (error) {
            fail(c, NO_CONNECTION);
            return;
        }
        opened++;
        c->state = READING_HEAD;
        send_rest(c);
        return;
    }
    if (what & EPOLLOUT && c->sent < c->request_size) {
        send_rest(c);
        if (!is_asking(c)) return;
    }
    if (!(what & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t size = recv(c->fd, buffer, sizeof buffer, 0);
    int64_t now = now_ns();
    if (size > 0 && c->state != RESTING) take_bytes(c, buffer, (size_t)size, now);
    else if (size == 0 || (size < 0 && errno != EAGAIN)) end_of_input(c, now);
}

/* Starting clients in time. */

static int next_client; /* of `clients`, or of the plan */

/* When the next client or request is due; INT64_MAX when there is none, or not before another has ended. */
static int64_t next_start(void) {
    if (options.mode == TRACE) return next_client < planned_count ? started + plan[next_client].at : INT64_MAX;
    if (next_client >= options.clients || (options.mode == IDLE && under_way >= OPENING_AT_ONCE)) return INT64_MAX;
    return started + (int64_t)(options.spread_s * NS_PER_S * next_client / options.clients);
}

static struct client *free_client(void) {
    if (resting_count) return resting[--resting_count];
    for (int i = 0; i < room_for_clients; i++)
        if (clients[i].state == UNUSED) return &clients[i];
    return NULL;
}

static void start_planned(int64_t now) {
    struct planned *next = &plan[next_client++];
    int64_t due = started + next->at;
    struct client *c = free_client();
    if (!c) {
        failures[NO_CONNECTION]++, ended++;
        return;
    }
    add(&lates, now - due);
    c->expected = next->chunks;
    c->request = make_request(next->chunks, next->prompt_bytes, &c->request_size);
    ask(c, due);
}

static void start_due(int64_t now) {
    while (next_start() <= now) {
        if (options.mode == TRACE) {
            start_planned(now);
            continue;
        }
        struct client *c = &clients[next_client++];
        c->expected = options.chunks;
        c->request_size = shared_request_size;
        if (options.mode == CLOSED) {
            go_on(c);
        } else {
            c->request = shared_request;
            ask(c, now);
        }
    }
}

/* Phases of `hold` and `idle`. */

static long count_alive(void) {
    long alive = 0;
    for (int i = 0; i < room_for_clients; i++) alive += clients[i].fd >= 0;
    return alive;
}

static void mark(const char *name) {
    printf("{\"mark\": \"%s\", \"alive\": %ld}\n", name, count_alive());
    fflush(stdout);
}

static void begin_hold(int64_t now) {
    phase = HOLDING;
    gaps.size = 0; /* those of the steady state count */
    window_started = now;
}

static void told_to_go_on(int64_t now) {
    char byte;
    if (read(0, &byte, 1) <= 0) exit(1); /* whoever waited for us is gone */
    if (phase == WAITING_TO_HOLD) begin_hold(now);
    else if (phase == WAITING_TO_END) phase = FINISHED;
}

static void advance(int64_t now) {
    bool all_started = next_client >= (options.mode == TRACE ? planned_count : options.clients);
    bool is_over = now - started > options.limit_s * NS_PER_S;
    if (options.mode == CLOSED || options.mode == TRACE) {
        if (is_over || (all_started && !under_way)) phase = FINISHED;
    } else if (phase == OPENING) {
        bool is_open = all_started && (options.mode == IDLE ? !under_way : begun + ended >= options.clients);
        if (!is_open && !is_over) return;
        mark("open");
        phase = WAITING_TO_HOLD;
        if (!options.wait) begin_hold(now);
    } else if (phase == HOLDING && now - window_started > options.hold_s * NS_PER_S) {
        window_ended = now;
        mark("held");
        phase = options.wait ? WAITING_TO_END : FINISHED;
    }
}

static void on_timer(int64_t now) {
    uint64_t expirations;
    if (read(timer_fd, &expirations, sizeof expirations) < 0 && errno != EAGAIN) exit(1);
    if (now < next_tick) return;
    add(&lags, now - next_tick);
    next_tick += ((now - next_tick) / TICK + 1) * TICK;
}

static void set_timer(void) {
    int64_t due = next_start();
    if (due > next_tick) due = next_tick;
    struct itimerspec when = {.it_value = {.tv_sec = due / NS_PER_S, .tv_nsec = due % NS_PER_S}};
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
}

static void run(void) {
    started = now_ns();
    next_tick = started + TICK;
    while (phase != FINISHED) {
        struct epoll_event ready[512];
        start_due(now_ns());
        set_timer();
        int count = epoll_wait(epoll_fd, ready, 512, -1);
        for (int i = 0; i < count; i++) {
            if (ready[i].data.ptr == &timer_fd) on_timer(now_ns());
            else if (ready[i].data.ptr == &phase) told_to_go_on(now_ns());
            else serve(ready[i].data.ptr, ready[i].events);
        }
        advance(now_ns());
    }
}

/* Results. */

static void report(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    int64_t now = now_ns();
    if (options.mode != HOLD)
        for (int i = 0; i < room_for_clients; i++) failures[TIMED_OUT] += is_asking(&clients[i]);
    printf("{\"generator\": \"c\", \"requests\": %ld, \"events\": %ld, \"window_events\": %ld, \"window_s\": %.4f, ", done_count, events,
           window_events, (double)(window_ended - window_started) / NS_PER_S);
    printf("\"begun\": %ld, \"reads\": %ld, \"coalesced\": %ld, \"reconnects\": %ld, \"connections\": %ld, \"alive\": %ld, ", begun,
           reads_with_events, coalesced, reconnects, opened, count_alive());
    print_series("ttft_ms", &ttft);
    print_series("gap_ms", &gaps);
    print_series("e2e_ms", &e2e);
    print_series("lag_ms", &lags);
    print_series("late_ms", &lates);
    printf("\"failures\": {");
    for (int kind = 0; kind < FAILURES; kind++) printf("%s\"%s\": %ld", kind ? ", " : "", failure_names[kind], failures[kind]);
    printf("}, \"wall_s\": %.4f, \"cpu_s\": %.4f}\n", (double)(now - started) / NS_PER_S,
           (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6);
}

/* Start. */

static void prepare(void) {
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    long longest = options.mode == TRACE ? read_trace(options.trace) : options.prompt_bytes;
    make_prompt(longest);
    if (options.mode == IDLE) options.chunks = 0;
    shared_request = make_request(options.chunks, options.mode == TRACE ? 0 : longest, &shared_request_size);
    requests_left = options.requests;
    room_for_clients = options.clients;
    clients = calloc((size_t)room_for_clients, sizeof *clients);
    resting = calloc((size_t)room_for_clients, sizeof *resting);
    if (!clients || !resting) abort();
    for (int i = 0; i < room_for_clients; i++) clients[i].fd = -1;
    epoll_fd = epoll_create1(0);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &(struct epoll_event){.events = EPOLLIN, .data.ptr = &timer_fd});
    if (options.wait) epoll_ctl(epoll_fd, EPOLL_CTL_ADD, 0, &(struct epoll_event){.events = EPOLLIN, .data.ptr = &phase});
}

int main(int count, char **arguments) {
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* never outlives the benchmark */
    for (int i = 1; i < count; i++) read_option(arguments[i]);
    if (!options.port || options.clients < 1 || (options.mode == TRACE && !options.trace))
        return fprintf(stderr, "load: --port=N is needed, and --trace=FILE with --mode=trace\n"), 2;
    prepare();
    run();
    report();
    return 0;
}
