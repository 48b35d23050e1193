// SPDX-License-Identifier: GPL-2.0-only
/* /sys/module/hawk_peermem/state: one number or word a file. */
#include <linux/kobject.h>
#include <linux/module.h>
#include <linux/sysfs.h>

#include "peermem.h"

struct hawk_counters hawk_counters;

struct counter_attribute {
	struct module_attribute attribute;
	const atomic64_t *counter;
};

static ssize_t show_counter(struct module_attribute *attribute, struct module_kobject *module, char *buffer)
{
	struct counter_attribute *counter = container_of(attribute, struct counter_attribute, attribute);

	return sysfs_emit(buffer, "%lld\n", atomic64_read(counter->counter));
}

static ssize_t show_core(struct module_attribute *attribute, struct module_kobject *module, char *buffer)
{
	return sysfs_emit(buffer, "%s\n", hawk_client_registered() ? "registered" : "absent");
}

#define COUNTER(name)								\
	static struct counter_attribute name##_attribute = {			\
		.attribute = __ATTR(name, 0444, show_counter, NULL),		\
		.counter = &hawk_counters.name,					\
	}

COUNTER(regions);
COUNTER(bytes);
COUNTER(acquired);
COUNTER(invalidated);
COUNTER(not_ours);
COUNTER(refused);
COUNTER(map_failures);

static struct module_attribute core_attribute = __ATTR(peer_memory_core, 0444, show_core, NULL);

static struct attribute *attributes[] = {
	&core_attribute.attr,
	&regions_attribute.attribute.attr,
	&bytes_attribute.attribute.attr,
	&acquired_attribute.attribute.attr,
	&invalidated_attribute.attribute.attr,
	&not_ours_attribute.attribute.attr,
	&refused_attribute.attribute.attr,
	&map_failures_attribute.attribute.attr,
	NULL
};

static const struct attribute_group group = { .name = "state", .attrs = attributes };

int hawk_state_init(void)
{
	return sysfs_create_group(&THIS_MODULE->mkobj.kobj, &group);
}

void hawk_state_exit(void)
{
	sysfs_remove_group(&THIS_MODULE->mkobj.kobj, &group);
}
