/* SPDX-License-Identifier: GPL-2.0-only */
/* What the modules show and take: sysfs, debugfs, the host's file. */
#ifndef FILES_H
#define FILES_H

#include <stdbool.h>
#include <stddef.h>

#define STATE		"/sys/module/hawk_peermem/state/"
#define CORE_PARAMETER	"/sys/module/hawk_peer_core/parameters/"
#define CORE_DEBUG	"/sys/kernel/debug/hawk_peer_core/"

long long read_number(const char *path);
void write_number(const char *path, long long value);
/* Like write_number, for text; returns -1 with errno. */
int write_text(const char *path, const char *text);

/* Mounts debugfs where it is not. */
void need_debugfs(void);

/* The core's events since clear_events(), joined by ", ". Valid until the next call. */
const char *events(void);
void clear_events(void);

/* Bytes of the host's file behind the BARs, read there. */
void read_host(const char *bar, unsigned long long offset, void *to, size_t size);

/* Nothing is registered any more, in the client and in the core, and no contract was broken. */
void check_nothing_left(const char *after);

/* Waits up to a few seconds for a file to hold a number. */
bool wait_number(const char *path, long long value);

#endif
