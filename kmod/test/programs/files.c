// SPDX-License-Identifier: GPL-2.0-only
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

#include "check.h"

#define WAIT_MS		10000
#define WAIT_STEP_MS	20

static ssize_t read_text(const char *path, char *to, size_t size)
{
	int file = open(path, O_RDONLY | O_CLOEXEC);
	size_t have = 0;
	ssize_t got = 1;

	if (file < 0)
		fail("open %s", path);
	while (got > 0 && have < size - 1) {
		got = read(file, to + have, size - 1 - have);
		if (got < 0)
			fail("read %s", path);
		have += got;
	}
	close(file);
	to[have] = 0;
	return have;
}

long long read_number(const char *path)
{
	char text[64];

	read_text(path, text, sizeof(text));
	return strtoll(text, NULL, 0);
}

int write_text(const char *path, const char *text)
{
	int file = open(path, O_WRONLY | O_CLOEXEC);
	ssize_t done;
	int error;

	if (file < 0)
		return -1;
	done = write(file, text, strlen(text));
	error = errno;
	close(file);
	errno = error;
	return done == (ssize_t)strlen(text) ? 0 : -1;
}

void write_number(const char *path, long long value)
{
	char text[32];

	snprintf(text, sizeof(text), "%lld", value);
	if (write_text(path, text))
		fail("write %s to %s", text, path);
}

void need_debugfs(void)
{
	if (access(CORE_DEBUG "events", F_OK) == 0)
		return;
	mount("debugfs", "/sys/kernel/debug", "debugfs", 0, NULL);
	if (access(CORE_DEBUG "events", F_OK))
		fail("no %s", CORE_DEBUG);
}

const char *events(void)
{
	static char text[16384], joined[2 * sizeof(text)];
	char *from, *to = joined;

	read_text(CORE_DEBUG "events", text, sizeof(text));
	for (from = text; *from; from++) {
		if (*from != '\n')
			*to++ = *from;
		else if (from[1])
			to = stpcpy(to, ", ");
	}
	*to = 0;
	return joined;
}

void clear_events(void)
{
	if (write_text(CORE_DEBUG "events", "0"))
		fail("clear events");
}

void read_host(const char *bar, unsigned long long offset, void *to, size_t size)
{
	int file = open(bar, O_RDONLY | O_CLOEXEC);

	if (file < 0)
		fail("open %s", bar);
	while (size) {
		ssize_t got = pread(file, to, size, offset);

		if (got <= 0)
			fail("read %s at %llu", bar, offset);
		to = (char *)to + got;
		offset += got;
		size -= got;
	}
	close(file);
}

bool wait_number(const char *path, long long value)
{
	int waited;

	for (waited = 0; waited < WAIT_MS; waited += WAIT_STEP_MS) {
		if (read_number(path) == value)
			return true;
		usleep(WAIT_STEP_MS * 1000);
	}
	return read_number(path) == value;
}

/* Registrations of processes that have just ended go a moment later. */
void check_nothing_left(const char *after)
{
	char name[128];

	snprintf(name, sizeof(name), "no region is left after %s", after);
	wait_number(STATE "regions", 0);
	check_number(name, 0, read_number(STATE "regions"));
	snprintf(name, sizeof(name), "no byte is counted after %s", after);
	check_number(name, 0, read_number(STATE "bytes"));
	snprintf(name, sizeof(name), "the core holds nothing after %s", after);
	wait_number(CORE_DEBUG "live", 0);
	check_number(name, 0, read_number(CORE_DEBUG "live"));
	snprintf(name, sizeof(name), "the contract was kept until after %s", after);
	check_number(name, 0, read_number(CORE_DEBUG "violations"));
}
