/* SPDX-License-Identifier: GPL-2.0-only */
/* What the files of the stand-in core share. */
#ifndef HAWK_TEST_PEER_CORE_H
#define HAWK_TEST_PEER_CORE_H

#include <linux/completion.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/refcount.h>
#include <linux/xarray.h>
#include <rdma/ib_umem.h>

#include "peer_mem.h"

/**
 * struct peer_client - a registered client
 * @umems: its registrations by core context; the xarray's lock makes a lookup and its kref one step
 * @users: registrations, and one for the client's own
 * @unused: completed with the last of them
 */
struct peer_client {
	struct list_head list;
	const struct peer_memory_client *ops;
	bool invalidates;
	struct xarray umems;
	refcount_t users;
	struct completion unused;
};

enum peer_state {
	PEER_NEW,
	PEER_MAPPED,
	PEER_INVALIDATED,	/* the device has stopped; the client unmaps, or has */
	PEER_UNMAPPED,
};

/**
 * struct peer_umem - one registration
 * @umem: what a driver that knows only mainline's ib_umem sees of it
 * @kref: an invalidation may hold it past its end
 * @lock: guards @state; held around the client's functions, as by the real core
 * @stop: called once when the memory goes; on return the device makes no more accesses. May be NULL
 */
struct peer_umem {
	struct ib_umem umem;
	struct kref kref;
	struct peer_client *client;
	void *context;
	u32 id;
	struct mutex lock;
	enum peer_state state;
	struct device *dma_device;
	void (*stop)(void *device);
	void *device;
};

/* clients.c */
struct peer_client *peer_clients_acquire(unsigned long address, size_t size, void **context);
void peer_client_release(struct peer_client *client, void *context);
bool peer_client_unmaps(const struct peer_client *client);

/* umem.c */
struct peer_umem *peer_umem_get(unsigned long address, size_t size, bool writable, struct device *dma_device,
				void (*stop)(void *device), void *device);
void peer_umem_release(struct peer_umem *umem);
int peer_umem_invalidate(struct peer_client *client, u32 id);

static inline struct sg_table *peer_umem_table(struct peer_umem *umem)
{
	return &umem->umem.sgt_append.sgt;
}

/* hooks.c: ib_umem_get() and ib_umem_release() of the kernel offer ranges to clients. */
int peer_hooks_init(void);
void peer_hooks_exit(void);

/* events.c */
extern atomic_t peer_live;
extern atomic_t peer_violations;
void peer_event(const char *format, ...) __printf(1, 2);
void peer_violation(const char *format, ...) __printf(1, 2);
int peer_events_init(void);
void peer_events_exit(void);

/* hca.c */
int peer_hca_init(void);
void peer_hca_exit(void);

#endif
