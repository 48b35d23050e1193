// SPDX-License-Identifier: GPL-2.0-only
#include "check.h"

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_TIMEOUT	120

static unsigned int good_checks, bad_checks;

static void too_late(int signal)
{
	static const char text[] = "not ok time-out: expected an end, got none\n";

	(void)!write(STDOUT_FILENO, text, sizeof(text) - 1);
	_exit(1);
}

struct options parse_options(int count, char **arguments)
{
	static const struct option names[] = {
		{ "device", required_argument, NULL, 'd' },
		{ "gid", required_argument, NULL, 'g' },
		{ "bar", required_argument, NULL, 'b' },
		{ "expect", required_argument, NULL, 'e' },
		{ "iterations", required_argument, NULL, 'i' },
		{ "timeout", required_argument, NULL, 't' },
		{ }
	};
	struct options options = {
		.device = "rxe0", .gid = 1, .expect = "ok", .iterations = 500, .timeout = DEFAULT_TIMEOUT,
	};
	int letter;

	while ((letter = getopt_long(count, arguments, "", names, NULL)) != -1) {
		switch (letter) {
		case 'd':
			options.device = optarg;
			break;
		case 'g':
			options.gid = atoi(optarg);
			break;
		case 'b':
			options.bar = optarg;
			break;
		case 'e':
			options.expect = optarg;
			break;
		case 'i':
			options.iterations = atoi(optarg);
			break;
		case 't':
			options.timeout = atoi(optarg);
			break;
		default:
			fail("usage: %s [--device D] [--gid N] [--bar FILE] [--expect efault|ok] [--iterations N] [--timeout S]",
			     arguments[0]);
		}
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	signal(SIGALRM, too_late);
	alarm(options.timeout);
	return options;
}

bool check(bool good, const char *name, const char *format, ...)
{
	va_list arguments;

	if (good) {
		good_checks++;
		printf("ok %s\n", name);
		return true;
	}
	bad_checks++;
	printf("not ok %s: ", name);
	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	putchar('\n');
	return false;
}

bool check_number(const char *name, long long expected, long long found)
{
	return check(expected == found, name, "expected %lld, got %lld", expected, found);
}

bool check_error(const char *name, int expected, int result)
{
	int error = result ? errno : 0;

	return check(error == expected, name, "expected error %d (%s), got %d (%s)", expected, strerror(expected),
		     error, strerror(error));
}

void fail(const char *format, ...)
{
	int error = errno;
	va_list arguments;

	fflush(stdout);
	printf("not ok setting up: ");
	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	printf(" (errno %d: %s)\n", error, strerror(error));
	exit(1);
}

int finish(void)
{
	if (!good_checks && !bad_checks)
		printf("not ok nothing: expected a check, got none\n");
	return !good_checks || bad_checks;
}

void fill(void *to, size_t size, unsigned int seed)
{
	uint8_t *bytes = to;
	size_t i;

	for (i = 0; i < size; i++)
		bytes[i] = pattern(i, seed);
}

long long first_difference(const void *data, size_t size, unsigned int seed)
{
	const uint8_t *bytes = data;
	size_t i;

	for (i = 0; i < size; i++)
		if (bytes[i] != pattern(i, seed))
			return i;
	return -1;
}
