// SPDX-License-Identifier: GPL-2.0-only
/* A failure after each step of a registration: what was done is undone in order, and nothing is left. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "files.h"
#include "hca.h"
#include "npu.h"
#include "rdma.h"

#define REPEATS		50
#define PAUSE_MS	900

struct fault {
	int after;
	const char *what;
	const char *events;
};

/* The core's steps; see fail_after in umem.c. */
static const struct fault faults[] = {
	{ 1, "a failure after acquire", "acquire 1, release" },
	{ 2, "a failure after the core's id", "acquire 1, release" },
	{ 3, "a failure after get_pages", "acquire 1, get_pages 0, put_pages, release" },
	{ 4, "a failure after dma_map", "acquire 1, get_pages 0, dma_map 0, dma_unmap, put_pages, release" },
};

static void check_events(const char *expected, const char *what)
{
	char name[128];

	snprintf(name, sizeof(name), "%s: the order of calls", what);
	check(!strcmp(events(), expected), name, "expected \"%s\", got \"%s\"", expected, events());
}

static void core_faults(struct rdma *rdma, struct window *window)
{
	char name[128];
	size_t i;
	int j;

	for (i = 0; i < sizeof(faults) / sizeof(*faults); i++) {
		struct ibv_mr *mr;

		write_number(CORE_PARAMETER "fail_after", faults[i].after);
		clear_events();
		errno = 0;
		mr = rdma_register(rdma, window->at, window->size);
		snprintf(name, sizeof(name), "%s: the error reaches the caller", faults[i].what);
		check(!mr && errno == EIO, name, "expected EIO, got %p, errno %d", (void *)mr, errno);
		check_events(faults[i].events, faults[i].what);
		for (j = 0; j < REPEATS; j++)
			if (rdma_register(rdma, window->at, window->size))
				fail("a registration came through");
		check_nothing_left(faults[i].what);
	}
	write_number(CORE_PARAMETER "fail_after", 0);
}

static void whole_life(struct rdma *rdma, struct window *window)
{
	struct ibv_mr *mr;

	clear_events();
	mr = rdma_register(rdma, window->at, window->size);
	if (!mr || ibv_dereg_mr(mr))
		fail("register and deregister");
	check_events("acquire 1, get_pages 0, dma_map 0, dma_unmap, put_pages, release", "a whole life");
}

/* Soft-RoCE and a part of the BAR that has no struct pages: the client's own failure, in dma_map. */
static void client_fault_pages(struct rdma *rdma, int device)
{
	struct window window = window_get(device, LARGE_WINDOW, 1, 0);
	long long failures = read_number(STATE "map_failures");
	struct ibv_mr *mr;

	window_map(&window, NULL);
	clear_events();
	errno = 0;
	mr = rdma_register(rdma, window.at + (2UL << 30), 4096);
	check(!mr && errno == EOPNOTSUPP, "no struct pages: verbs", "expected EOPNOTSUPP, got %p, errno %d", (void *)mr, errno);
	check_events("acquire 1, get_pages 0, dma_map -95, put_pages, release", "no struct pages");
	check_number("no struct pages: the failure is counted", failures + 1, read_number(STATE "map_failures"));
	window_put(&window);
}

/* The HCA runs out of DMA mappings: in the first entry, and after some, which must be undone. */
static void client_fault_mappings(int device)
{
	uint8_t *base = reserve_addresses(4 * SMALL_WINDOW);
	struct window windows[4];
	int budget, i;

	for (i = 0; i < 4; i++) {	/* channels with gaps, so that there are four runs */
		windows[i] = window_get(device, SMALL_WINDOW, 2 * i, 0);
		window_map(&windows[i], base + i * SMALL_WINDOW);
	}
	for (budget = 0; budget < 4; budget++) {
		int hca = hca_open();
		char name[128];

		write_number(CORE_PARAMETER "map_budget", budget);
		clear_events();
		snprintf(name, sizeof(name), "%d of 4 DMA mappings", budget);
		check_error(name, EIO, hca_register(hca, base, 4 * SMALL_WINDOW, 0));
		check_events("acquire 1, get_pages 0, dma_map -5, put_pages, release", name);
		snprintf(name, sizeof(name), "%d of 4 DMA mappings: those are undone", budget);
		check_number(name, 0, hca_status(hca).mappings);
		close(hca);
	}
	write_number(CORE_PARAMETER "map_budget", -1);
	for (i = 0; i < 4; i++)
		window_put(&windows[i]);
}

/* munmap() of a window by another thread, a moment after it was asked for. */
struct unmapping {
	pthread_t thread;
	struct window *window;
};

static void *unmap_soon(void *argument)
{
	struct unmapping *unmapping = argument;

	usleep(PAUSE_MS * 1000 / 3);
	window_unmap(unmapping->window);
	return NULL;
}

/*
 * The memory goes between two steps of its registration. The core pauses after a step, for the later ones with its lock
 * of the registration: a client that needed mmap_lock after that, or held a lock of its own around the core's function,
 * would stay there for ever.
 */
static void gone_between(int step, const char *what, int error, const char *either, const char *or)
{
	int device = npu_open(), hca = hca_open(), ret;
	struct window window = window_get(device, SMALL_WINDOW, 0, 0);
	struct unmapping unmapping = { .window = &window };
	struct hca_status status;
	char name[128];

	window_map(&window, NULL);
	write_number(CORE_PARAMETER "pause_ms", PAUSE_MS);
	write_number(CORE_PARAMETER "pause_after", step);
	clear_events();
	if (pthread_create(&unmapping.thread, NULL, unmap_soon, &unmapping))
		fail("start a thread");
	ret = hca_register(hca, window.at, window.size, 0);
	snprintf(name, sizeof(name), "%s: registration", what);
	check_error(name, error, ret);
	pthread_join(unmapping.thread, NULL);
	write_number(CORE_PARAMETER "pause_after", 0);
	snprintf(name, sizeof(name), "%s: the order of calls", what);
	check(!strcmp(events(), either) || !strcmp(events(), or), name, "expected \"%s\" or \"%s\", got \"%s\"", either, or,
	      events());
	status = hca_status(hca);
	snprintf(name, sizeof(name), "%s: no DMA mapping is left", what);
	check_number(name, 0, status.mappings);
	snprintf(name, sizeof(name), "%s: the HCA was stopped if it had the memory", what);
	check_number(name, !error, status.invalidated);
	close(hca);
	window_put(&window);
	close(device);
}

static void races_with_munmap(void)
{
	gone_between(1, "munmap after acquire", EFAULT, "acquire 1, get_pages -14, release",
		     "acquire 1, get_pages -14, release");
	gone_between(2, "munmap after the core's id", EFAULT, "acquire 1, get_pages -14, release",
		     "acquire 1, get_pages -14, release");
	gone_between(3, "munmap after get_pages", EFAULT,
		     "acquire 1, get_pages 0, dma_map -14, put_pages, release, invalidate unmapped",
		     "acquire 1, get_pages 0, dma_map -14, put_pages, invalidate unmapped, release");
	gone_between(4, "munmap after dma_map", 0, "acquire 1, get_pages 0, dma_map 0, invalidate mapped",
		     "acquire 1, get_pages 0, dma_map 0, invalidate mapped");
}

int main(int count, char **arguments)
{
	struct options options = parse_options(count, arguments);
	struct rdma rdma = rdma_open(&options);
	int device = npu_open();
	struct window window = window_get(device, SMALL_WINDOW, 3, 0);

	need_debugfs();
	window_map(&window, NULL);
	whole_life(&rdma, &window);
	core_faults(&rdma, &window);
	client_fault_pages(&rdma, device);
	client_fault_mappings(device);
	check_nothing_left("the client's own failures");
	races_with_munmap();
	check_nothing_left("memory that went while it was registered");
	window_put(&window);
	rdma_close(&rdma);
	return finish();
}
