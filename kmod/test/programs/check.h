/* SPDX-License-Identifier: GPL-2.0-only */
/* Checks and options that all programs share. */
#ifndef CHECK_H
#define CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct options {
	const char *device;	/* RDMA device */
	int gid;		/* index of its GID */
	const char *bar;	/* the file behind the NPU's BARs, as the host sees it; NULL: the host's side is not looked at */
	const char *expect;	/* "efault": without a peer-memory client; "ok" */
	unsigned int iterations;
	unsigned int timeout;	/* seconds, after which the program is killed */
};

/* Parses --device, --gid, --bar, --expect, --iterations and --timeout, and starts the clock. */
struct options parse_options(int count, char **arguments);

/* Prints "ok NAME" or "not ok NAME: ..."; returns whether it was ok. */
bool check(bool good, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));
bool check_number(const char *name, long long expected, long long found);
bool check_error(const char *name, int expected, int result);	/* result 0 or -1 with errno */

/* Ends the program: something that is no check went wrong. */
void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* The exit status: 0 if there was a check and none failed. */
int finish(void);

/* Byte i of pattern number seed. */
static inline uint8_t pattern(size_t i, unsigned int seed)
{
	return (uint8_t)(i * 131 + (i >> 12) * 7 + seed * 29 + 0x5a);
}

void fill(void *to, size_t size, unsigned int seed);
/* The first byte that differs from the pattern, or -1. */
long long first_difference(const void *data, size_t size, unsigned int seed);

#endif
