// SPDX-License-Identifier: GPL-2.0-only
#include "npu.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "abi.h"
#include "check.h"

int npu_open(void)
{
	int device = open(NPU_NODE, O_RDWR | O_CLOEXEC);

	if (device < 0)
		fail("open %s", NPU_NODE);
	return device;
}

int window_aim(struct window *window, int channel, uint64_t address)
{
	struct tt_configure_tlb call = { .in = {
		.id = window->id,
		.target = {
			.addr = address,
			.x_end = 17 + (channel >= 4),
			.y_end = 12 + 3 * (channel % 4) + channel % 3,	/* any of the three ports */
			.ordering = 1,
		},
	} };

	if (ioctl(window->device, TT_CONFIGURE_TLB, &call))
		return -1;
	window->host = channel * CHANNEL_SIZE + address;
	return 0;
}

struct window window_get(int device, size_t size, int channel, uint64_t address)
{
	struct tt_allocate_tlb call = { .in = { .size = size } };
	struct window window;

	if (ioctl(device, TT_ALLOCATE_TLB, &call))
		fail("allocate a window of %zu bytes", size);
	window = (struct window){ .device = device, .id = call.out.id, .mmap_offset = call.out.mmap_offset_wc, .size = size };
	if (window_aim(&window, channel, address))
		fail("aim window %u at channel %d, %#llx", window.id, channel, (unsigned long long)address);
	return window;
}

void window_map(struct window *window, void *where)
{
	int flags = MAP_SHARED | (where ? MAP_FIXED : 0);

	window->at = mmap(where, window->size, PROT_READ | PROT_WRITE, flags, window->device, window->mmap_offset);
	if (window->at == MAP_FAILED)
		fail("map window %u", window->id);
}

int window_unmap(struct window *window)
{
	int ret = munmap(window->at, window->size);

	if (!ret)
		window->at = NULL;
	return ret;
}

int window_free(const struct window *window)
{
	struct tt_free_tlb call = { .id = window->id };

	return ioctl(window->device, TT_FREE_TLB, &call);
}

void window_put(struct window *window)
{
	if (window->at && window_unmap(window))
		fail("unmap window %u", window->id);
	if (window_free(window))
		fail("free window %u", window->id);
}

uint8_t *reserve_addresses(size_t size)
{
	uint8_t *at = mmap(NULL, size + SMALL_WINDOW, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (at == MAP_FAILED)
		fail("reserve %zu bytes of addresses", size);
	return (uint8_t *)(((uintptr_t)at + SMALL_WINDOW - 1) & ~(SMALL_WINDOW - 1));
}
