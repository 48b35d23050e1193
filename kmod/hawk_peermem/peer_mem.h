/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The peer-memory interface of the RDMA core in MLNX_OFED, DOCA-OFED and Ubuntu's kernels. Mainline has none, so there
 * is no header to include: these are own declarations of the same layout.
 *
 * For a user range that get_user_pages() cannot pin, the core asks each client in turn:
 *
 *   acquire        is it yours? 1: yes, all of it. Runs in the process that registers.
 *   get_pages      from now on @core_context may be invalidated. Called with the core's lock of this registration.
 *   dma_map        fill the table with DMA addresses for one device
 *   get_page_size  the granularity of what was filled in
 *   dma_unmap, put_pages, release   in that order, when the registration ends
 *
 * A client that loses the memory calls the function that it was given at registration. When that returns no device
 * touches the memory any more. With PEER_MEM_INVALIDATE_UNMAPS the client then unmaps by itself, and neither dma_unmap
 * nor put_pages follows; without, the core has called both from within. release always comes last.
 */
#ifndef HAWK_PEER_MEM_H
#define HAWK_PEER_MEM_H

#include <linux/scatterlist.h>
#include <linux/types.h>

struct device;

#define IB_PEER_MEMORY_NAME_MAX	64
#define IB_PEER_MEMORY_VER_MAX	16

struct peer_memory_client {
	char name[IB_PEER_MEMORY_NAME_MAX];
	char version[IB_PEER_MEMORY_VER_MAX];
	int (*acquire)(unsigned long addr, size_t size, void *peer_mem_private_data, char *peer_mem_name,
		       void **client_context);
	int (*get_pages)(unsigned long addr, size_t size, int write, int force, struct sg_table *sg_head,
			 void *client_context, u64 core_context);
	int (*dma_map)(struct sg_table *sg_head, void *client_context, struct device *dma_device, int dmasync,
		       int *nmap);
	int (*dma_unmap)(struct sg_table *sg_head, void *client_context, struct device *dma_device);
	void (*put_pages)(struct sg_table *sg_head, void *client_context);
	unsigned long (*get_page_size)(void *client_context);
	void (*release)(void *client_context);
};

enum {
	PEER_MEM_INVALIDATE_UNMAPS = 1 << 0,
};

/* Used if the last byte of client.version is not 0. */
struct peer_memory_client_ex {
	struct peer_memory_client client;
	size_t ex_size;
	u32 flags;
};

typedef int (*invalidate_peer_memory)(void *reg_handle, u64 core_context);

void *ib_register_peer_memory_client(const struct peer_memory_client *peer_client,
				     invalidate_peer_memory *invalidate_callback);
void ib_unregister_peer_memory_client(void *reg_handle);

#endif
