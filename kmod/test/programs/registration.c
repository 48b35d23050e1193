// SPDX-License-Identifier: GPL-2.0-only
/*
 * ibv_reg_mr() on windows, and RDMA through them, compared byte for byte with what the host sees behind the BAR.
 *
 * --expect efault: no client is loaded, and ibv_reg_mr() must fail.
 */
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "abi.h"
#include "check.h"
#include "files.h"
#include "npu.h"
#include "rdma.h"

#define REGISTRATIONS	64

/* Writes a pattern to a registered range, reads it back, and looks at it from the process and from the host. */
static void exchange(const struct options *options, struct rdma *rdma, struct ibv_mr *mr, uint8_t *at, uint64_t host,
		     size_t size, const char *what, unsigned int seed)
{
	uint8_t *sent = malloc(size), *seen = malloc(size);
	char name[160];

	if (!sent || !seen)
		fail("allocate %zu bytes", size);
	fill(sent, size, seed);
	memset(seen, 0, size);
	snprintf(name, sizeof(name), "%s: RDMA write", what);
	check_number(name, IBV_WC_SUCCESS, rdma_write(rdma, sent, at, mr->rkey, size));
	snprintf(name, sizeof(name), "%s: RDMA read", what);
	check_number(name, IBV_WC_SUCCESS, rdma_read(rdma, seen, at, mr->rkey, size));
	snprintf(name, sizeof(name), "%s: what is read is what was written", what);
	check_number(name, -1, first_difference(seen, size, seed));
	if (options->bar) {
		memset(seen, 0, size);
		read_host(options->bar, host, seen, size);
		snprintf(name, sizeof(name), "%s: the host sees what was written", what);
		check_number(name, -1, first_difference(seen, size, seed));
	}
	free(sent);
	free(seen);
}

static struct ibv_mr *register_or_fail(struct rdma *rdma, void *at, size_t size, const char *what)
{
	struct ibv_mr *mr = rdma_register(rdma, at, size);

	if (!mr)
		check(false, what, "expected a registration, got errno %d", errno);
	return mr;
}

static void one_window(const struct options *options, struct rdma *rdma, int device)
{
	static const struct { size_t offset, size; int channel; } parts[] = {
		{ 0, SMALL_WINDOW, 0 }, { 1, 1, 1 }, { 4095, 2, 2 }, { 4097, 12345, 3 }, { 100, 4096, 4 },
		{ SMALL_WINDOW - 7, 7, 5 }, { 65536, 1 << 20, 6 }, { 3, SMALL_WINDOW - 5, 7 },
	};
	size_t i;

	for (i = 0; i < sizeof(parts) / sizeof(*parts); i++) {
		struct window window = window_get(device, SMALL_WINDOW, parts[i].channel, 4 * SMALL_WINDOW);
		uint8_t edge[2] = { 0xee, 0xee };
		struct ibv_mr *mr;
		uint8_t *at;
		char what[64];

		window_map(&window, NULL);
		at = window.at + parts[i].offset;
		snprintf(what, sizeof(what), "2 MiB window, %zu bytes at offset %zu", parts[i].size, parts[i].offset);
		memset(window.at, 0xee, window.size);
		mr = register_or_fail(rdma, at, parts[i].size, what);
		if (mr) {
			exchange(options, rdma, mr, at, window.host + parts[i].offset, parts[i].size, what, i);
			if (parts[i].offset)
				edge[0] = at[-1];
			if (parts[i].offset + parts[i].size < window.size)
				edge[1] = at[parts[i].size];
			check(edge[0] == 0xee && edge[1] == 0xee, "no byte beside it was touched", "expected ee ee, got %02x %02x",
			      edge[0], edge[1]);
			ibv_dereg_mr(mr);
		}
		window_put(&window);
	}
}

/*
 * Adjacent windows of different channels and files, and one registration: the end of one, all of the next, and where the
 * third begins.
 */
static void several_windows(const struct options *options, struct rdma *rdma, int device)
{
	uint8_t *base = reserve_addresses(3 * SMALL_WINDOW);
	size_t before = 5000, after = 7001, size = before + SMALL_WINDOW + after, i;
	int other = npu_open();
	uint8_t *sent = malloc(size), *seen = malloc(size);
	struct window windows[3];
	struct ibv_mr *mr;

	for (i = 0; i < 3; i++) {
		windows[i] = window_get(i == 2 ? other : device, SMALL_WINDOW, 7 - 3 * i, i * SMALL_WINDOW);
		window_map(&windows[i], base + i * SMALL_WINDOW);
	}
	mr = register_or_fail(rdma, base + SMALL_WINDOW - before, size, "three windows: registration");
	if (mr) {
		uint8_t *at = base + SMALL_WINDOW - before;

		fill(sent, size, 77);
		memset(seen, 0, size);
		check_number("three windows: RDMA write", IBV_WC_SUCCESS, rdma_write(rdma, sent, at, mr->rkey, size));
		check_number("three windows: RDMA read", IBV_WC_SUCCESS, rdma_read(rdma, seen, at, mr->rkey, size));
		check_number("three windows: what is read is what was written", -1, first_difference(seen, size, 77));
		if (options->bar) {
			read_host(options->bar, windows[0].host + SMALL_WINDOW - before, seen, before);
			read_host(options->bar, windows[1].host, seen + before, SMALL_WINDOW);
			read_host(options->bar, windows[2].host, seen + before + SMALL_WINDOW, after);
			check_number("three windows: the host sees each part in its channel", -1,
				     first_difference(seen, size, 77));
		}
		ibv_dereg_mr(mr);
	}
	errno = 0;
	munmap(base + SMALL_WINDOW, SMALL_WINDOW);
	windows[1].at = NULL;
	mr = rdma_register(rdma, base, 3 * SMALL_WINDOW);
	check(!mr && errno == EFAULT, "a range with a hole is refused", "expected EFAULT, got %p, errno %d", (void *)mr, errno);
	for (i = 0; i < 3; i++)
		window_put(&windows[i]);
	close(other);
	free(sent);
	free(seen);
}

/*
 * Soft-RoCE reaches what has struct pages: a part at the window's start. That the rest can be registered too is shown
 * with the software HCA (the fence program).
 */
static void large_window(const struct options *options, struct rdma *rdma, int device)
{
	struct window window = window_get(device, LARGE_WINDOW, 5, 0);
	struct ibv_mr *mr;

	window_map(&window, NULL);
	mr = register_or_fail(rdma, window.at + 1234567, 40 << 20, "4 GiB window: registration");
	if (mr) {
		exchange(options, rdma, mr, window.at + 1234567, window.host + 1234567, 3 << 20, "4 GiB window", 9);
		ibv_dereg_mr(mr);
	}
	errno = 0;
	mr = rdma_register(rdma, window.at + (3UL << 30), 8192);
	check(!mr && errno == EOPNOTSUPP, "4 GiB window: soft-RoCE is refused where the BAR has no struct pages",
	      "expected EOPNOTSUPP, got %p, errno %d", (void *)mr, errno);
	window_put(&window);
}

static void many(const struct options *options, struct rdma *rdma, int device)
{
	struct window windows[REGISTRATIONS];
	struct ibv_mr *mrs[REGISTRATIONS];
	uint8_t sent[4096], seen[4096];
	int i, registered = 0, right = 0;

	for (i = 0; i < REGISTRATIONS; i++) {
		windows[i] = window_get(device, SMALL_WINDOW, i % CHANNELS, (i / CHANNELS) * SMALL_WINDOW);
		window_map(&windows[i], NULL);
		mrs[i] = rdma_register(rdma, windows[i].at, SMALL_WINDOW);
		registered += mrs[i] != NULL;
	}
	check_number("64 registrations at once", REGISTRATIONS, registered);
	check_number("64 registrations at once: the client counts them", REGISTRATIONS, read_number(STATE "regions"));
	check_number("64 registrations at once: and their bytes", REGISTRATIONS * SMALL_WINDOW, read_number(STATE "bytes"));
	for (i = 0; i < REGISTRATIONS; i++) {
		fill(sent, sizeof(sent), i);
		if (mrs[i])
			rdma_write(rdma, sent, windows[i].at + i * 4096, mrs[i]->rkey, sizeof(sent));
	}
	for (i = 0; i < REGISTRATIONS; i++) {
		if (options->bar)
			read_host(options->bar, windows[i].host + i * 4096, seen, sizeof(seen));
		else
			memcpy(seen, windows[i].at + i * 4096, sizeof(seen));
		right += first_difference(seen, sizeof(seen), i) == -1;
	}
	check_number("64 registrations at once: each shows its own bytes", REGISTRATIONS, right);
	for (i = 0; i < REGISTRATIONS; i++) {
		if (mrs[i])
			ibv_dereg_mr(mrs[i]);
		window_put(&windows[i]);
	}
}

static void check_refused(struct rdma *rdma, void *at, size_t size, int error, const char *counter, const char *what)
{
	long long before = read_number(counter);
	struct ibv_mr *mr;
	char name[128];

	errno = 0;
	mr = rdma_register(rdma, at, size);
	check(!mr && errno == error, what, "expected errno %d, got %p, errno %d", error, (void *)mr, errno);
	snprintf(name, sizeof(name), "%s: that is counted", what);
	check_number(name, before + 1, read_number(counter));
	if (mr)
		ibv_dereg_mr(mr);
}

/* Pages of the BAR in a mapping of sysfs. Past those that have a cached kernel mapping, since sysfs maps uncached. */
static void *map_bar_by_sysfs(size_t size)
{
	glob_t found;
	void *at;
	int file;

	if (glob("/sys/bus/pci/drivers/tenstorrent/*:*:*.*/resource4", 0, NULL, &found) || found.gl_pathc != 1)
		fail("find the BAR in sysfs");
	file = open(found.gl_pathv[0], O_RDWR | O_CLOEXEC);
	at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 1 << 30);
	if (file < 0 || at == MAP_FAILED)
		fail("map %s", found.gl_pathv[0]);
	close(file);
	globfree(&found);
	return at;
}

static void ordinary_memory(struct rdma *rdma)
{
	void *plain = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	long long before = read_number(STATE "acquired") + read_number(STATE "not_ours");
	struct ibv_mr *mr = rdma_register(rdma, plain, 8192);

	check(mr != NULL, "ordinary memory registers as ever", "expected a registration, got errno %d", errno);
	if (mr)
		ibv_dereg_mr(mr);
	check_number("ordinary memory never reaches the client", before,
		     read_number(STATE "acquired") + read_number(STATE "not_ours"));
	munmap(plain, 8192);
}

/* What is not the driver's, or not all of it, or not in its BARs. */
static void others(struct rdma *rdma, int device)
{
	uint8_t *base = reserve_addresses(2 * SMALL_WINDOW);
	struct window window = window_get(device, SMALL_WINDOW, 0, 0);
	void *foreign = map_bar_by_sysfs(8192);
	void *outside = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, device,
			     (off_t)NPU_MMAP_OUTSIDE << TT_MMAP_KIND_SHIFT);

	check_refused(rdma, foreign, 8192, EFAULT, STATE "not_ours", "the BAR's pages in somebody else's mapping are refused");
	if (outside == MAP_FAILED)
		fail("map memory outside the BARs");
	check_refused(rdma, outside, 8192, EFAULT, STATE "refused",
		      "the driver's mapping of memory outside its BARs is refused");
	munmap(foreign, 8192);
	munmap(outside, 8192);
	window_map(&window, base);
	if (mmap(base + SMALL_WINDOW, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
	    MAP_FAILED)
		fail("map memory behind a window");
	check_refused(rdma, base + SMALL_WINDOW - 1, 2, EFAULT, STATE "not_ours",
		      "a window and ordinary memory behind it are refused");
	window_put(&window);
}

static void read_only(struct rdma *rdma, int device)
{
	struct window window = window_get(device, SMALL_WINDOW, 0, 0);
	struct ibv_mr *mr;

	window_map(&window, NULL);
	if (mprotect(window.at, window.size, PROT_READ))
		fail("mprotect");
	errno = 0;
	mr = rdma_register(rdma, window.at, SMALL_WINDOW);
	check(!mr && errno == EACCES, "a window that may only be read is refused for writing",
	      "expected EACCES, got %p, errno %d", (void *)mr, errno);
	mr = ibv_reg_mr(rdma->pd, window.at, SMALL_WINDOW, IBV_ACCESS_REMOTE_READ);
	check(mr != NULL, "a window that may only be read is taken for reading", "expected a registration, got errno %d", errno);
	if (mr)
		ibv_dereg_mr(mr);
	window_put(&window);
}

static void limits(struct rdma *rdma, int device)
{
	static const char regions[] = "/sys/module/hawk_peermem/parameters/max_regions";
	static const char megabytes[] = "/sys/module/hawk_peermem/parameters/max_region_mb";
	long long most = read_number(regions), largest = read_number(megabytes);
	struct window window = window_get(device, SMALL_WINDOW, 0, 0);
	struct ibv_mr *mr;

	window_map(&window, NULL);
	write_number(regions, 1);
	mr = rdma_register(rdma, window.at, 4096);
	check(mr != NULL, "max_regions=1: one is taken", "got errno %d", errno);
	check_refused(rdma, window.at + 4096, 4096, EFAULT, STATE "refused", "max_regions=1: a second is refused");
	write_number(regions, most);
	if (mr)
		ibv_dereg_mr(mr);
	write_number(megabytes, 1);
	check_refused(rdma, window.at, (1 << 20) + 1, EFAULT, STATE "refused", "max_region_mb=1: one byte more is refused");
	mr = rdma_register(rdma, window.at, 1 << 20);
	check(mr != NULL, "max_region_mb=1: 1 MiB is taken", "got errno %d", errno);
	if (mr)
		ibv_dereg_mr(mr);
	write_number(megabytes, largest);
	window_put(&window);
}

int main(int count, char **arguments)
{
	struct options options = parse_options(count, arguments);
	struct rdma rdma = rdma_open(&options);
	int device = npu_open();

	if (!strcmp(options.expect, "efault")) {
		struct window window = window_get(device, SMALL_WINDOW, 0, 0);
		struct ibv_mr *mr;

		window_map(&window, NULL);
		errno = 0;
		mr = rdma_register(&rdma, window.at, SMALL_WINDOW);
		check(!mr && errno == EFAULT, "without a client ibv_reg_mr() fails", "expected EFAULT, got %p, errno %d",
		      (void *)mr, errno);
		window_put(&window);
		return finish();
	}
	need_debugfs();
	one_window(&options, &rdma, device);
	several_windows(&options, &rdma, device);
	large_window(&options, &rdma, device);
	many(&options, &rdma, device);
	ordinary_memory(&rdma);
	others(&rdma, device);
	read_only(&rdma, device);
	limits(&rdma, device);
	check_nothing_left("registrations");
	rdma_close(&rdma);
	return finish();
}
