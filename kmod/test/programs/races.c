// SPDX-License-Identifier: GPL-2.0-only
/*
 * Registrations that come and go while their memory does: in munmap(), in exit() and beside fork(). Each round is one
 * race; its moment is random, from a fixed seed. What may come out is a registration or EFAULT, and nothing is left.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "files.h"
#include "hca.h"
#include "npu.h"
#include "rdma.h"

#define SEED		20261130
#define LONGEST_US	1500
#define ROUND_TIMEOUT	30

static unsigned int seed = SEED;

static void wait_a_little(void)
{
	usleep(rand_r(&seed) % LONGEST_US);
}

/* What a thread that registers over and over has seen. */
struct registering {
	const struct options *options;
	struct window *window;
	atomic_bool begun;
	atomic_bool end;
	unsigned int taken, refused, other;
	int last_error;
};

static void count(struct registering *registering, bool taken, int error)
{
	if (taken) {
		registering->taken++;
	} else if (error == EFAULT) {
		registering->refused++;
	} else {
		registering->other++;
		registering->last_error = error;
	}
}

static void by_hca(struct registering *registering)
{
	int hca = hca_open();
	bool taken = !hca_register(hca, registering->window->at, SMALL_WINDOW, 0);
	int error = errno;

	if (taken)
		hca_run(hca, 0);
	close(hca);
	count(registering, taken, error);
}

static void by_verbs(struct registering *registering, struct rdma *rdma)
{
	struct ibv_mr *mr = rdma_register(rdma, registering->window->at, SMALL_WINDOW);
	int error = errno;

	if (mr)
		ibv_dereg_mr(mr);
	count(registering, mr != NULL, error);
}

static void *register_on(void *argument)
{
	struct registering *registering = argument;
	struct rdma rdma = rdma_open(registering->options);

	do {
		by_hca(registering);
		by_verbs(registering, &rdma);
		registering->begun = true;
	} while (!registering->end);
	rdma_close(&rdma);
	return NULL;
}

/* Opening the RDMA device takes longer than many rounds. */
static void wait_begun(const struct registering *registering)
{
	while (!registering->begun)
		usleep(1000);
}

static void check_outcomes(const struct registering *registering, const char *what)
{
	char name[128];

	printf("# %s: %u registrations, %u refused with EFAULT\n", what, registering->taken, registering->refused);
	snprintf(name, sizeof(name), "%s: nothing but success and EFAULT", what);
	check(!registering->other, name, "got errno %d, %u times", registering->last_error, registering->other);
	snprintf(name, sizeof(name), "%s: some registrations came about", what);
	check(registering->taken, name, "expected some, got none");
}

static void race_munmap(const struct options *options)
{
	int device = npu_open();
	struct window window = window_get(device, SMALL_WINDOW, 0, 0);
	struct registering registering = { .options = options, .window = &window };
	uint8_t *at = reserve_addresses(SMALL_WINDOW);
	pthread_t thread;
	unsigned int i;

	window_map(&window, at);
	if (pthread_create(&thread, NULL, register_on, &registering))
		fail("start a thread");
	wait_begun(&registering);
	for (i = 0; i < options->iterations; i++) {
		wait_a_little();
		if (munmap(at, SMALL_WINDOW))
			fail("munmap");
		window_map(&window, at);
	}
	registering.end = true;
	pthread_join(thread, NULL);
	check_outcomes(&registering, "munmap races");
	check(registering.refused, "munmap races: some registrations lost", "expected some, got none");
	window_put(&window);
	close(device);
}

/* A process that ends while a thread of it registers; what was open is closed by exit. */
static void end_while_registering(const struct options *options)
{
	int device = npu_open();
	struct window window = window_get(device, SMALL_WINDOW, 1, 0);
	struct registering registering = { .options = options, .window = &window };
	pthread_t thread;

	alarm(ROUND_TIMEOUT);
	window_map(&window, NULL);
	if (pthread_create(&thread, NULL, register_on, &registering))
		_exit(1);
	wait_a_little();
	usleep(2 * LONGEST_US);
	_exit(0);
}

static void race_exit(const struct options *options)
{
	unsigned int i, good = 0;
	int status;

	fflush(stdout);
	for (i = 0; i < options->iterations; i++) {
		pid_t child = fork();

		rand_r(&seed);
		if (!child)
			end_while_registering(options);
		if (waitpid(child, &status, 0) == child && status == 0)
			good++;
	}
	check_number("exit races: all processes ended", options->iterations, good);
}

static void race_fork(const struct options *options)
{
	int device = npu_open();
	struct window window = window_get(device, SMALL_WINDOW, 2, 0);
	struct registering registering = { .options = options, .window = &window };
	pthread_t thread;
	unsigned int i, good = 0;
	int status;

	window_map(&window, NULL);
	fflush(stdout);
	if (pthread_create(&thread, NULL, register_on, &registering))
		fail("start a thread");
	wait_begun(&registering);
	for (i = 0; i < options->iterations; i++) {
		pid_t child;

		wait_a_little();
		child = fork();
		if (!child) {
			munmap(window.at, SMALL_WINDOW);
			_exit(0);
		}
		if (waitpid(child, &status, 0) == child && status == 0)
			good++;
	}
	registering.end = true;
	pthread_join(thread, NULL);
	check_number("fork races: all children ended", options->iterations, good);
	check_outcomes(&registering, "fork races");
	check_number("fork races: no registration lost its memory", 0, registering.refused);
	window_put(&window);
	close(device);
}

int main(int count, char **arguments)
{
	struct options options = parse_options(count, arguments);

	need_debugfs();
	race_munmap(&options);
	check_nothing_left("munmap races");
	race_exit(&options);
	check_nothing_left("exit races");
	race_fork(&options);
	check_nothing_left("fork races");
	return finish();
}
