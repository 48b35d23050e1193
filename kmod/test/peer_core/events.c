// SPDX-License-Identifier: GPL-2.0-only
/*
 * What happened, for tests to read, in debugfs hawk_peer_core:
 *   events      a line for each call of a client, in order; writing anything empties it
 *   live        registrations
 *   violations  how often a client broke the contract (the kernel log says how)
 */
#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/seq_file.h>
#include <linux/spinlock.h>

#include "core.h"

#define EVENTS_MAX	256
#define EVENT_LENGTH	64

atomic_t peer_live;
atomic_t peer_violations;

static DEFINE_SPINLOCK(lock);
static char events[EVENTS_MAX][EVENT_LENGTH];
static unsigned int count;
static struct dentry *folder;

/* Events past the table's end are dropped: tests that make many do not read them. */
void peer_event(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	spin_lock(&lock);
	if (count < EVENTS_MAX)
		vscnprintf(events[count++], EVENT_LENGTH, format, arguments);
	spin_unlock(&lock);
	va_end(arguments);
}

void peer_violation(const char *format, ...)
{
	struct va_format text;
	va_list arguments;

	va_start(arguments, format);
	text.fmt = format;
	text.va = &arguments;
	pr_err("%s: contract: %pV\n", KBUILD_MODNAME, &text);
	va_end(arguments);
	atomic_inc(&peer_violations);
}

static int events_show(struct seq_file *file, void *unused)
{
	unsigned int i;

	spin_lock(&lock);
	for (i = 0; i < count; i++)
		seq_printf(file, "%s\n", events[i]);
	spin_unlock(&lock);
	return 0;
}

static int events_open(struct inode *inode, struct file *file)
{
	return single_open(file, events_show, NULL);
}

static ssize_t events_write(struct file *file, const char __user *from, size_t size, loff_t *position)
{
	spin_lock(&lock);
	count = 0;
	spin_unlock(&lock);
	return size;
}

static const struct file_operations events_fops = {
	.owner = THIS_MODULE,
	.open = events_open,
	.read = seq_read,
	.write = events_write,
	.llseek = seq_lseek,
	.release = single_release,
};

int peer_events_init(void)
{
	folder = debugfs_create_dir(KBUILD_MODNAME, NULL);
	if (IS_ERR(folder))
		return PTR_ERR(folder);
	debugfs_create_file("events", 0600, folder, NULL, &events_fops);
	debugfs_create_atomic_t("live", 0400, folder, &peer_live);
	debugfs_create_atomic_t("violations", 0400, folder, &peer_violations);
	return 0;
}

void peer_events_exit(void)
{
	debugfs_remove_recursive(folder);
}
