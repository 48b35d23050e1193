// SPDX-License-Identifier: GPL-2.0-only
/*
 * After an invalidation has returned no byte is written any more: seen in the memory itself, through a second mapping of
 * the same pages, and with a control, an HCA that is deaf to invalidations, in which the same look finds writes.
 *
 * And what the software HCA can do that soft-RoCE cannot: all of a 4 GiB window, DMA addresses that are not physical
 * ones.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "files.h"
#include "hca.h"
#include "npu.h"

#define ROUNDS		40
#define LOOK_US		3000

/* How often the first 8 bytes of a window changed in the time after it was unmapped. */
static unsigned int writes_after_munmap(uint32_t flags, unsigned int rounds, unsigned int *stopped)
{
	int device = npu_open();
	struct window window = window_get(device, SMALL_WINDOW, 1, 0);
	struct window spy = window_get(device, SMALL_WINDOW, 1, 0);
	volatile uint64_t *seen;
	unsigned int changed = 0, i;

	window_map(&spy, NULL);
	seen = (volatile uint64_t *)spy.at;
	*stopped = 0;
	for (i = 0; i < rounds; i++) {
		int hca = hca_open();

		window_map(&window, NULL);
		if (hca_register(hca, window.at, window.size, flags) || hca_run(hca, 0) || !hca_is_running(hca))
			fail("let the software HCA write");
		window_unmap(&window);
		*seen = UINT64_MAX;	/* the pages are somebody else's now */
		usleep(LOOK_US);
		changed += *seen != UINT64_MAX;
		*stopped += hca_status(hca).invalidated;
		close(hca);
	}
	window_put(&spy);
	window_put(&window);
	close(device);
	return changed;
}

static void fence(void)
{
	unsigned int stopped;

	check_number("no write after munmap, in 40 rounds", 0, writes_after_munmap(0, ROUNDS, &stopped));
	check_number("the HCA was told in each", ROUNDS, stopped);
	check_number("control: an HCA that is deaf writes on, and the same look sees it", 3,
		     writes_after_munmap(HCA_DEAF, 3, &stopped));
	check_nothing_left("the fence");
}

static void large_window(const struct options *options)
{
	static const uint64_t places[] = { 0, 1, (1ULL << 30) - 3, (2ULL << 30) + 5, LARGE_WINDOW - 9000 };
	static uint8_t sent[9000], seen[9000];
	int device = npu_open(), hca = hca_open();
	struct window window = window_get(device, LARGE_WINDOW, 6, 0);
	char name[128];
	size_t i;

	window_map(&window, NULL);
	clear_events();
	check_error("4 GiB window: registered whole", 0, hca_register(hca, window.at, window.size, 0));
	check_number("4 GiB window: in entries of 1 GiB", 4, hca_status(hca).mappings);
	check_number("4 GiB window: counted", (long long)LARGE_WINDOW, read_number(STATE "bytes"));
	for (i = 0; i < sizeof(places) / sizeof(*places); i++) {
		fill(sent, sizeof(sent), i);
		memset(seen, 0, sizeof(seen));
		snprintf(name, sizeof(name), "4 GiB window: the HCA writes at %#llx", (unsigned long long)places[i]);
		check_error(name, 0, hca_write(hca, places[i], sent, sizeof(sent)));
		if (options->bar)
			read_host(options->bar, window.host + places[i], seen, sizeof(seen));
		else
			memcpy(seen, window.at + places[i], sizeof(seen));
		snprintf(name, sizeof(name), "4 GiB window: the host sees it at %#llx", (unsigned long long)places[i]);
		check_number(name, -1, first_difference(seen, sizeof(seen), i));
	}
	check_error("4 GiB window: past its end", ERANGE, hca_write(hca, LARGE_WINDOW - 1, sent, 2));
	window_unmap(&window);
	check_error("4 GiB window: after munmap", ENODEV, hca_write(hca, 0, sent, 1));
	check_number("4 GiB window: no DMA mapping is left", 0, hca_status(hca).mappings);
	close(hca);
	window_put(&window);
	close(device);
	check_nothing_left("a 4 GiB window");
}

/* Two 4 GiB windows side by side: one registration of 8 GiB. */
static void two_large_windows(void)
{
	uint8_t *base = reserve_addresses(2 * LARGE_WINDOW);
	int device = npu_open(), hca = hca_open(), i;
	struct window windows[2];
	static uint8_t sent[10000];

	for (i = 0; i < 2; i++) {
		windows[i] = window_get(device, LARGE_WINDOW, 4 - i, 0);
		window_map(&windows[i], base + i * LARGE_WINDOW);
	}
	check_error("two 4 GiB windows: one registration", 0, hca_register(hca, base, 2 * LARGE_WINDOW, 0));
	fill(sent, sizeof(sent), 5);
	check_error("two 4 GiB windows: across their border", 0, hca_write(hca, LARGE_WINDOW - 4000, sent, sizeof(sent)));
	check(!memcmp(windows[0].at + LARGE_WINDOW - 4000, sent, 4000) && !memcmp(windows[1].at, sent + 4000, 6000),
	      "two 4 GiB windows: each has its part", "expected the pattern, got other bytes");
	close(hca);
	for (i = 0; i < 2; i++)
		window_put(&windows[i]);
	close(device);
	check_nothing_left("two 4 GiB windows");
}

int main(int count, char **arguments)
{
	struct options options = parse_options(count, arguments);

	need_debugfs();
	fence();
	large_window(&options);
	two_large_windows();
	return finish();
}
