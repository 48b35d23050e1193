/* SPDX-License-Identifier: GPL-2.0-only */
/* What the files share beside regions: parameters, the counters, the core. */
#ifndef HAWK_PEERMEM_PEERMEM_H
#define HAWK_PEERMEM_PEERMEM_H

#include <linux/atomic.h>
#include <linux/types.h>

#define HAWK_PEERMEM_VERSION	"0.1.0"

/* main.c: the parameters. */
const char *hawk_owner(void);
unsigned int hawk_max_regions(void);
u64 hawk_max_region_bytes(void);

/**
 * struct hawk_counters - shown in /sys/module/hawk_peermem/state
 * @regions: live now
 * @bytes: of the live regions
 * @acquired: regions since the module was loaded
 * @invalidated: regions that lost their memory before they were released
 * @not_ours: ranges offered by the core that are not the driver's. Every failing ibv_reg_mr() in the system counts
 * @refused: ranges of the driver that were not taken: a limit, a page outside its BARs, no memory
 * @map_failures: regions that could not be mapped for a device
 */
struct hawk_counters {
	atomic64_t regions;
	atomic64_t bytes;
	atomic64_t acquired;
	atomic64_t invalidated;
	atomic64_t not_ours;
	atomic64_t refused;
	atomic64_t map_failures;
};

/* state.c */
extern struct hawk_counters hawk_counters;
int hawk_state_init(void);
void hawk_state_exit(void);

/* client.c */
int hawk_client_register(void);
void hawk_client_unregister(void);
bool hawk_client_registered(void);
void hawk_client_invalidate(u64 core_context);

#endif
