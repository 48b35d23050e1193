// SPDX-License-Identifier: GPL-2.0-only
/* The clients: their registration, and who takes a range. */
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/stddef.h>

#include "core.h"

static bool ignore_flags;
module_param(ignore_flags, bool, 0644);
MODULE_PARM_DESC(ignore_flags, "behave like a core that does not know PEER_MEM_INVALIDATE_UNMAPS");

static DEFINE_MUTEX(clients_lock);
static LIST_HEAD(clients);

static int invalidate(void *registration, u64 core_context)
{
	return peer_umem_invalidate(registration, core_context);
}

bool peer_client_unmaps(const struct peer_client *client)
{
	const struct peer_memory_client_ex *ex = container_of(client->ops, struct peer_memory_client_ex, client);

	if (ignore_flags || !client->ops->version[IB_PEER_MEMORY_VER_MAX - 1])
		return false;
	return ex->ex_size >= offsetofend(struct peer_memory_client_ex, flags) &&
	       ex->flags & PEER_MEM_INVALIDATE_UNMAPS;
}

void *ib_register_peer_memory_client(const struct peer_memory_client *peer_client,
				     invalidate_peer_memory *invalidate_callback)
{
	struct peer_client *client;

	if (!peer_client->acquire || !peer_client->get_pages || !peer_client->put_pages || !peer_client->dma_map ||
	    !peer_client->dma_unmap)
		return NULL;
	client = kzalloc(sizeof(*client), GFP_KERNEL);
	if (!client)
		return NULL;
	client->ops = peer_client;
	xa_init_flags(&client->umems, XA_FLAGS_ALLOC1);
	refcount_set(&client->users, 1);
	init_completion(&client->unused);
	if (invalidate_callback) {
		*invalidate_callback = invalidate;
		client->invalidates = true;
	}
	mutex_lock(&clients_lock);
	list_add_tail(&client->list, &clients);
	mutex_unlock(&clients_lock);
	pr_info("%s: client %s %s\n", KBUILD_MODNAME, peer_client->name, peer_client->version);
	return client;
}
/* Not GPL-only, as in the cores that this stands for: it decides how a client may find it. */
EXPORT_SYMBOL(ib_register_peer_memory_client);

static void drop_user(struct peer_client *client)
{
	if (refcount_dec_and_test(&client->users))
		complete(&client->unused);
}

void ib_unregister_peer_memory_client(void *reg_handle)
{
	struct peer_client *client = reg_handle;

	mutex_lock(&clients_lock);
	list_del(&client->list);
	mutex_unlock(&clients_lock);
	drop_user(client);
	wait_for_completion(&client->unused);
	xa_destroy(&client->umems);
	kfree(client);
}
EXPORT_SYMBOL(ib_unregister_peer_memory_client);

/* The first client that takes the range, or NULL. */
struct peer_client *peer_clients_acquire(unsigned long address, size_t size, void **context)
{
	struct peer_client *client;
	int ret;

	mutex_lock(&clients_lock);
	list_for_each_entry(client, &clients, list) {
		ret = client->ops->acquire(address, size, NULL, NULL, context);
		peer_event("acquire %d", ret);
		if (ret > 1)
			peer_violation("acquire returned %d", ret);
		if (ret <= 0)
			continue;
		refcount_inc(&client->users);
		mutex_unlock(&clients_lock);
		return client;
	}
	mutex_unlock(&clients_lock);
	return NULL;
}

void peer_client_release(struct peer_client *client, void *context)
{
	peer_event("release");
	client->ops->release(context);
	drop_user(client);
}
