// SPDX-License-Identifier: Apache-2.0
/*
 * usage: direct DEVICE GID_INDEX BYTES ROUNDS WINDOW
 * What an RC queue pair of this process reaches on its own, by verbs: writes
 * to another queue pair of the same device, at most WINDOW under way, polled.
 * Prints the nanoseconds of all rounds, and the median from a post to its
 * completion.
 */
#include <err.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { DEPTH = 128, PORT = 1, PSN = 0 };

static uint64_t now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static struct ibv_context *open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = NULL;

	for (struct ibv_device **at = list; at && *at && !context; at++)
		if (!strcmp(ibv_get_device_name(*at), name))
			context = ibv_open_device(*at);
	if (!context)
		errx(1, "no device %s", name);
	return context;
}

static void check(int failed, const char *what)
{
	if (failed)
		errx(1, "%s: %s", what, strerror(failed));
}

static struct ibv_qp *create(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = PORT,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	if (!qp)
		err(1, "ibv_create_qp");
	check(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
	return qp;
}

/* With the numbers that gdrd takes on such a port. */
static void join(struct ibv_qp *qp, struct ibv_qp *peer, const union ibv_gid *gid, int gid_index, enum ibv_mtu mtu)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = mtu,
		.dest_qp_num = peer->qp_num,
		.rq_psn = PSN,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 12,
		.ah_attr = {
			.is_global = 1,
			.grh = { .dgid = *gid, .sgid_index = (uint8_t)gid_index, .hop_limit = 64 },
			.port_num = PORT,
		},
	};

	check(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "RTR");
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS,
		.timeout = 14,
		.retry_cnt = 6,
		.rnr_retry = 7,
		.sq_psn = PSN,
		.max_rd_atomic = 1,
	};
	check(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			    IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC), "RTS");
}

static int by_time(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	if (argc != 6)
		errx(1, "usage: direct DEVICE GID_INDEX BYTES ROUNDS WINDOW");
	int gid_index = atoi(argv[2]);
	size_t bytes = (size_t)atoll(argv[3]), rounds = (size_t)atoll(argv[4]), window = (size_t)atoll(argv[5]);
	struct ibv_context *context = open_device(argv[1]);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, DEPTH, NULL, NULL, 0);
	char *memory = calloc(2, bytes);
	uint64_t *times = calloc(rounds, sizeof(*times));
	struct ibv_port_attr port;
	union ibv_gid gid;

	if (!pd || !cq || !memory || !times || window > DEPTH)
		errx(1, "no protection domain, completion queue or memory");
	check(ibv_query_port(context, PORT, &port), "ibv_query_port");
	if (ibv_query_gid(context, PORT, gid_index, &gid))
		err(1, "ibv_query_gid");
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, 2 * bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);

	if (!mr)
		err(1, "ibv_reg_mr");
	struct ibv_qp *qp = create(pd, cq), *peer = create(pd, cq);

	join(qp, peer, &gid, gid_index, port.active_mtu);
	join(peer, qp, &gid, gid_index, port.active_mtu);
	struct ibv_sge sge = { .addr = (uintptr_t)memory, .length = (uint32_t)bytes, .lkey = mr->lkey };
	struct ibv_send_wr write = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .remote_addr = (uintptr_t)memory + bytes, .rkey = mr->rkey },
	};
	uint64_t began = now_ns();

	for (size_t posted = 0, ended = 0; ended < rounds;) {
		struct ibv_send_wr *bad;
		struct ibv_wc wc;

		if (posted < rounds && posted - ended < window) {
			times[posted++] = now_ns();
			check(ibv_post_send(qp, &write, &bad), "ibv_post_send");
			continue;
		}
		int got = ibv_poll_cq(cq, 1, &wc);

		if (got < 0 || (got && wc.status))
			errx(1, "a write ended as %s", ibv_wc_status_str(wc.status));
		if (got) {
			times[ended] = now_ns() - times[ended];
			ended++;
		}
	}
	uint64_t total = now_ns() - began;

	qsort(times, rounds, sizeof(*times), by_time);
	printf("%llu %llu\n", (unsigned long long)total, (unsigned long long)times[rounds / 2]);
	return 0;
}
