/* SPDX-License-Identifier: GPL-2.0-only */
/* Windows of the NPU, through the driver's ABI. */
#ifndef NPU_H
#define NPU_H

#include <stddef.h>
#include <stdint.h>

#define NPU_NODE	"/dev/tenstorrent/0"
#define SMALL_WINDOW	(2UL << 20)
#define LARGE_WINDOW	(4UL << 30)
#define CHANNEL_SIZE	(4ULL << 30)
#define CHANNELS	8

struct window {
	int device;		/* open file of the node */
	uint32_t id;
	uint64_t mmap_offset;
	size_t size;
	uint8_t *at;		/* where it is mapped, or NULL */
	uint64_t host;		/* offset of its first byte in the host's file */
};

int npu_open(void);
/* Allocates a window and aims it at an address of a channel. Ends the program on an error. */
struct window window_get(int device, size_t size, int channel, uint64_t address);
/* Returns 0, or -1 with errno. */
int window_aim(struct window *window, int channel, uint64_t address);
/* Maps all of it, at a fixed address if there is one. */
void window_map(struct window *window, void *where);
int window_unmap(struct window *window);
int window_free(const struct window *window);
void window_put(struct window *window);

/* A range of addresses with nothing mapped, kept free for MAP_FIXED, aligned to 2 MiB. */
uint8_t *reserve_addresses(size_t size);

#endif
