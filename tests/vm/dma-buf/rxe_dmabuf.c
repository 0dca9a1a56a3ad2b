// SPDX-License-Identifier: GPL-2.0
/*
 * Gives soft RoCE (rxe) the operation that it lacks, reg_user_mr_dmabuf, for
 * tests in virtual machines only.
 *
 * rxe itself registers a mapping that is thrown away at once; then each page
 * slot of the region is pointed at the page of the dma-buf, which stays mapped
 * until the region is deregistered. So only exporters whose buffer is system
 * memory in a vmap serve: udmabuf and DMA heaps. The parameter `fail` is the
 * errno of the next registration, as of an exporter that cannot map. Linux 6.12, where rxe has its
 * pages in an xarray or, from a later stable release on, in an array
 * (drivers/infiniband/sw/rxe/rxe_mr.c; Kbuild looks which).
 */
#include <linux/dma-buf.h>
#include <linux/iosys-map.h>
#include <linux/mm.h>
#include <linux/mman.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/xarray.h>
#include <rdma/ib_verbs.h>
#include "rxe.h"

/* A region's hold on its buffer. */
struct hold {
	struct dma_buf *buf;
	struct iosys_map map;
};

/* Holds by the address of their region. */
static DEFINE_XARRAY(holds);
static int fail;
module_param(fail, int, 0644);
MODULE_PARM_DESC(fail, "errno of the next registration");
static int (*rxe_dereg_mr)(struct ib_mr *mr, struct ib_udata *udata);

static struct hold *hold_get(int fd, u64 offset, u64 length)
{
	struct hold *hold = kzalloc(sizeof(*hold), GFP_KERNEL);
	int err;

	if (!hold)
		return ERR_PTR(-ENOMEM);
	hold->buf = dma_buf_get(fd);
	if (IS_ERR(hold->buf)) {
		err = PTR_ERR(hold->buf);
		goto free;
	}
	err = -xchg(&fail, 0);
	if (err)
		goto put;
	err = -EINVAL;
	if (!length || offset + length < offset || offset + length > hold->buf->size)
		goto put;
	err = dma_buf_vmap_unlocked(hold->buf, &hold->map);
	if (err)
		goto put;
	if (!hold->map.is_iomem && is_vmalloc_addr(hold->map.vaddr))
		return hold;
	err = -EOPNOTSUPP;
	dma_buf_vunmap_unlocked(hold->buf, &hold->map);
put:
	dma_buf_put(hold->buf);
free:
	kfree(hold);
	return ERR_PTR(err);
}

static void hold_put(struct hold *hold)
{
	dma_buf_vunmap_unlocked(hold->buf, &hold->map);
	dma_buf_put(hold->buf);
	kfree(hold);
}

/* The slot is there: nothing is allocated. */
static void set_page(struct rxe_mr *mr, unsigned long slot, struct page *page)
{
#ifdef RXE_PAGE_INFO
	mr->page_info[slot].page = page;
#else
	xa_store(&mr->page_list, slot, page, GFP_KERNEL);
#endif
}

static struct ib_mr *reg_user_mr_dmabuf(struct ib_pd *pd, u64 offset, u64 length, u64 iova,
					int fd, int access, struct uverbs_attr_bundle *attrs)
{
	unsigned long in_page = offset & ~PAGE_MASK, place, page, pages;
	struct hold *hold = hold_get(fd, offset, length);
	struct ib_mr *mr;
	int err;

	if (IS_ERR(hold))
		return ERR_CAST(hold);
	pages = PAGE_ALIGN(in_page + length) >> PAGE_SHIFT;
	place = vm_mmap(NULL, 0, pages << PAGE_SHIFT, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS, 0);
	if (IS_ERR_VALUE(place)) {
		hold_put(hold);
		return ERR_PTR((long)place);
	}
	mr = pd->device->ops.reg_user_mr(pd, place + in_page, length, iova, access, NULL);
	/* Its pages stay with the region. */
	vm_munmap(place, pages << PAGE_SHIFT);
	if (IS_ERR(mr)) {
		hold_put(hold);
		return mr;
	}
	for (page = 0; page < pages; page++) {
		void *at = hold->map.vaddr + (offset & PAGE_MASK) + (page << PAGE_SHIFT);

		set_page(to_rmr(mr), page, vmalloc_to_page(at));
	}
	/* As the core does after reg_user_mr. */
	mr->iova = iova;
	mr->length = length;
	err = xa_err(xa_store(&holds, (unsigned long)mr, hold, GFP_KERNEL));
	if (err) {
		rxe_dereg_mr(mr, NULL);
		hold_put(hold);
		return ERR_PTR(err);
	}
	return mr;
}

static int dereg_mr(struct ib_mr *mr, struct ib_udata *udata)
{
	struct hold *hold = xa_load(&holds, (unsigned long)mr);
	int err;

	/* Before the region's memory, whose address is the key, is another's. */
	xa_erase(&holds, (unsigned long)mr);
	err = rxe_dereg_mr(mr, udata);
	if (err && hold)
		/* Still in use. Without memory for it leaked, and never unmapped under it. */
		xa_store(&holds, (unsigned long)mr, hold, GFP_KERNEL);
	else if (hold)
		hold_put(hold);
	return err;
}

static int add(struct ib_device *device)
{
	if (device->ops.driver_id != RDMA_DRIVER_RXE)
		return -EOPNOTSUPP;
	rxe_dereg_mr = device->ops.dereg_mr;
	device->ops.dereg_mr = dereg_mr;
	device->ops.reg_user_mr_dmabuf = reg_user_mr_dmabuf;
	return 0;
}

static void remove(struct ib_device *device, void *data)
{
	device->ops.reg_user_mr_dmabuf = NULL;
	device->ops.dereg_mr = rxe_dereg_mr;
}

static struct ib_client client = { .name = "rxe_dmabuf", .add = add, .remove = remove };

static int __init load(void)
{
	return ib_register_client(&client);
}

static void __exit unload(void)
{
	ib_unregister_client(&client);
}

module_init(load);
module_exit(unload);
MODULE_DESCRIPTION("dma-buf memory regions on soft RoCE, for tests");
MODULE_LICENSE("GPL");
MODULE_IMPORT_NS(DMA_BUF);
