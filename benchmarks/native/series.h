/* Samples of one kind, and their quantiles as JSON. */
#ifndef BENCH_SERIES_H
#define BENCH_SERIES_H

#include "wire.h"

#include <stdio.h>
#include <stdlib.h>

struct series { /* of milliseconds */
    double *values;
    size_t size, room;
};

static void add(struct series *series, int64_t ns) {
    if (series->size == series->room) {
        series->room = series->room ? 2 * series->room : 4096;
        series->values = realloc(series->values, series->room * sizeof(double));
        if (!series->values) abort();
    }
    series->values[series->size++] = (double)ns / NS_PER_MS;
}

static int by_value(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

static double at_quantile(const struct series *series, double quantile) {
    size_t index = (size_t)((double)series->size * quantile);
    return series->values[index < series->size ? index : series->size - 1];
}

static void print_series(const char *name, struct series *series) {
    if (!series->size) {
        printf("\"%s\": {\"count\": 0}, ", name);
        return;
    }
    qsort(series->values, series->size, sizeof(double), by_value);
    printf("\"%s\": {\"count\": %zu, \"p50\": %.4f, \"p90\": %.4f, \"p99\": %.4f, \"max\": %.4f}, ", name, series->size,
           at_quantile(series, 0.5), at_quantile(series, 0.9), at_quantile(series, 0.99), series->values[series->size - 1]);
}

#endif
