#!/usr/bin/env python3
"""Milliseconds to register, and to deregister, host ranges as one list with NIXL (UCX backend, DRAM).

usage: nixl_list COUNT LENGTH_BYTES; prints both. Needs nixl (PyPI); docs/performance.md says where to put it.
"""
import ctypes
import mmap
import os
import sys
import time

from nixl._api import nixl_agent, nixl_agent_config

count, length = int(sys.argv[1]), int(sys.argv[2])
memory = mmap.mmap(-1, count * length)

base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
ranges = [(base + index * length, length, 0, "") for index in range(count)]
agent = nixl_agent("bench", nixl_agent_config(backends=["UCX"]))
descriptors = agent.get_reg_descs(ranges, "DRAM")

start = time.perf_counter()
registered = agent.register_memory(descriptors)
middle = time.perf_counter()
agent.deregister_memory(registered)
end = time.perf_counter()
print(f"{(middle - start) * 1e3:.4f} {(end - middle) * 1e3:.4f}", flush=True)
# Without the agent's teardown, which may crash after the memory is gone.
os._exit(0)
