/* What upstream.c and load.c share: the clock, and a reader of chunked bodies that takes bytes as they come. */
#ifndef BENCH_WIRE_H
#define BENCH_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define NS_PER_MS 1000000LL
#define NS_PER_S 1000000000LL

static inline int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * NS_PER_S + now.tv_nsec;
}

enum chunked_state { AT_SIZE, AT_EXTENSION, IN_DATA, AFTER_DATA, IN_TRAILER, CHUNKED_DONE, CHUNKED_BAD };

struct chunked {
    enum chunked_state state;
    bool line_has_bytes;
    uint64_t left;
};

static inline int hex_value(char byte) {
    if (byte >= '0' && byte <= '9') return byte - '0';
    if (byte >= 'a' && byte <= 'f') return byte - 'a' + 10;
    if (byte >= 'A' && byte <= 'F') return byte - 'A' + 10;
    return -1;
}

/* Reads up to the end of one piece of data, or of the input. Returns the bytes used; the piece may be empty. */
static inline size_t chunked_next(struct chunked *body, const char *data, size_t size, const char **piece, size_t *length) {
    size_t at = 0;
    *length = 0;
    while (at < size && body->state < CHUNKED_DONE) {
        char byte = data[at];
        switch (body->state) {
        case AT_SIZE: {
            int digit = hex_value(byte);
            if (digit >= 0) {
                body->left = body->left << 4 | (uint64_t)digit;
                at++;
            } else if (byte == '\r' || byte == '\n' || byte == ';' || byte == ' ') {
                body->state = AT_EXTENSION;
            } else {
                body->state = CHUNKED_BAD;
            }
            break;
        }
        case AT_EXTENSION:
            at++;
            if (byte == '\n') {
                body->state = body->left ? IN_DATA : IN_TRAILER;
                body->line_has_bytes = false;
            }
            break;
        case IN_DATA: {
            size_t take = size - at < body->left ? size - at : (size_t)body->left;
            *piece = data + at;
            *length = take;
            body->left -= take;
            if (!body->left) body->state = AFTER_DATA;
            return at + take;
        }
        case AFTER_DATA:
            at++;
            if (byte == '\n') body->state = AT_SIZE;
            break;
        case IN_TRAILER:
            at++;
            if (byte == '\n' && !body->line_has_bytes) body->state = CHUNKED_DONE;
            else if (byte == '\n') body->line_has_bytes = false;
            else if (byte != '\r') body->line_has_bytes = true;
            break;
        default:
            break;
        }
    }
    return at;
}

#endif
