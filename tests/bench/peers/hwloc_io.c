/*
 * Peer of the rows read-*: hwloc on a captured tree (HWLOC_FSROOT), filtered to what gdrctl reads too: PCI devices, the
 * bridges above them and their network, RDMA and block devices. Prints how many PCI functions it found.
 *
 * libs: -lhwloc
 */
#include <hwloc.h>
#include <stdio.h>

static int count(hwloc_topology_t topology)
{
    int functions = 0;
    for (hwloc_obj_t dev = NULL; (dev = hwloc_get_next_pcidev(topology, dev)) != NULL;)
        functions++;
    for (hwloc_obj_t bridge = NULL; (bridge = hwloc_get_next_bridge(topology, bridge)) != NULL;)
        functions += bridge->attr->bridge.upstream_type == HWLOC_OBJ_BRIDGE_PCI;
    return functions;
}

int main(void)
{
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology) != 0)
        return 1;
    hwloc_topology_set_all_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_NONE);
    hwloc_topology_set_io_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_ALL);
    if (hwloc_topology_load(topology) != 0)
        return 1;
    printf("%d\n", count(topology));
    hwloc_topology_destroy(topology);
    return 0;
}
