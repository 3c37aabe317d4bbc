"""Cluster files for tests: builders, and a table of files with one mistake each, beside the line that tells of it."""
# ruff: noqa: E501 - a file and its mistake stand on one line

from __future__ import annotations


def node(node_id: str, address: str, **keys: object) -> str:
    lines = [f"{key} = {_toml(value)}" for key, value in {"id": node_id, "address": address, **keys}.items()]
    return "\n".join(["[[nodes]]", *lines, ""])


def cluster(*nodes: str, **keys: object) -> str:
    return "\n".join(["format = 1", "[cluster]", *(f"{k} = {_toml(v)}" for k, v in keys.items()), *nodes])


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def mesh(pp: int, tp: int, role: str, **keys: object) -> list[str]:
    """Nodes of a mesh, each on a host of its own."""
    return [
        node(f"n{s}{r}", f"10.0.{s}.{r + 1}:9000", role=role, stage=s, rank=r, **keys)
        for s in range(pp)
        for r in range(tp)
    ]


A, B = node("a", "h1:9000"), node("b", "h2:9000")
HYBRIDS = node("a", "10.93.0.1:9000") + "\n" + node("b", "10.93.0.2:9000")
STAGES = [node(f"s{s}", f"h{s}:9000", role="pipeline", stage=s) for s in (0, 1)]


def stages(*layers: str | None, pp: int = 2, **keys: object) -> str:
    nodes = [
        node(f"s{s}", f"h{s}:9000", role="pipeline", stage=s, **({"layers": ours} if ours else {}))
        for s, ours in enumerate(layers)
    ]
    return cluster(*nodes, pipeline_parallel_size=pp, **keys)


MISTAKES = [
    ("", "[[nodes]]: the file lists no node. Add [[nodes]] with an id and an address for each."),
    ("nodes = []", "[[nodes]]: the file lists no node. Add [[nodes]] with an id and an address for each."),
    ("format = 2\n" + A, "line 1: format: 2 is not known here. This version reads format = 1; update mlxcel_nb where the file comes from a newer one."),
    ("[[nodes]", "is not TOML: Expected ']]' at the end of an array declaration (at line 1, column 8). Text is \"quoted\", and a table has [brackets]."),
    ("[cluster]\n[cluster]", "is not TOML: Cannot declare [cluster] twice (at line 2, column 9). Text is \"quoted\", and a table has [brackets]."),
    (cluster(node(" a", "h:1")), 'line 4: node 1: id \' a\' begins or ends with a space. Write 1 to 128 bytes of printable text, like "mac1".'),
    ("x = " + "[" * 5000, "nests too deeply. Take the brackets away."),
    ("[nodes]\nid = 'a'", "line 1: [[nodes]]: is not a list of tables. Write [[nodes]], with two brackets, for each node."),
    ("cluster = 1\n" + A, "[cluster]: is not a table. Write [cluster] on a line of its own, and keys below it."),
    ("[[node]]\nid = 'a'", 'line 1: node is not a key of the top of the file. Perhaps nodes?'),
    ("colour = 'red'\n" + A, "line 1: colour is not a key of the top of the file. There may be cluster, format, nodes."),
    ("name = 'x'\n" + A, "line 1: name is not a key of the top of the file. It belongs under [cluster]."),
    (cluster(A, pipline=2), "line 3: [cluster]: pipline is not a key of [cluster]. Perhaps pipeline_parallel_size?"),
    (cluster(A, tensor=2), "line 3: [cluster]: tensor is not a key of [cluster]. Perhaps tensor_parallel_size?"),
    (cluster(node("a", "h1:9000", pipline=2)), "line 6: node a: pipline is not a key of [[nodes]]. There may be id, address, role, stage, rank, layers, group, replica, spare."),
    (cluster(A, nmae="x"), "line 3: [cluster]: nmae is not a key of [cluster]. Perhaps name?"),
    (cluster(A, stage=0), "line 3: [cluster]: stage is not a key of [cluster]. It belongs under [[nodes]]."),
    (cluster(node("a", "h:1", memory_bytes=0)), "line 6: node a: memory_bytes is not a key of [[nodes]]. It belongs under [nodes.resources]."),
    (cluster(A + "[nodes.resources]\nmemory_byte = 1"), 'line 7: node a, resources: memory_byte is not a key of [nodes.resources]. Perhaps memory_bytes?'),
    (cluster(A + "[nodes.resources]\nmemory_bytes = 1.6e10"), 'line 7: node a, resources: memory_bytes is a number, not a whole number. Write it like 16000000000.'),
    (cluster(A + "[nodes.resources]\ncompute_units = -1"), 'line 7: node a, resources: compute_units -1 is out of range. Write a whole number from 0 to 1048576.'),
    (cluster(A, tensor_parallel_size="2"), "line 3: [cluster]: tensor_parallel_size is text, not a whole number. Write it like 2."),
    (cluster(A, tensor_parallel_size=0), "line 3: [cluster]: tensor_parallel_size 0 is out of range. Write a whole number from 1 to 512."),
    (cluster(A, pipeline_parallel_size=True), "line 3: [cluster]: pipeline_parallel_size is true or false, not a whole number. Write it like 2."),
    (cluster(A, expert_parallel=1), "line 3: [cluster]: expert_parallel is a whole number, not true or false. Write it like true."),
    (cluster(A, transport="udp"), 'line 3: [cluster]: transport \'udp\' is not a choice. Choose from "auto", "tcp", "thunderbolt", "rdma".'),
    (cluster(A, discovery="mdns"), 'line 3: [cluster]: discovery \'mdns\' is not a choice. Choose from "static", "beacon".'),
    (cluster(A, elastic=True), 'line 3: [cluster]: elastic is true or false, not text. Write it like "off".'),
    (cluster(A, collectives="nccl"), 'line 3: [cluster]: collectives \'nccl\' is not a choice. Choose from "own", "mlx-ring", "mlx-jaccl", "mlx-nccl".'),
    (cluster(A, port_range="9010-9000"), 'line 3: [cluster]: port_range \'9010-9000\' is not a range of ports. Write the first and the last port, from 1 to 65535, like "9000-9010".'),
    (cluster(A, port_range="0-70000"), 'line 3: [cluster]: port_range \'0-70000\' is not a range of ports. Write the first and the last port, from 1 to 65535, like "9000-9010".'),
    (cluster(A, port_range="9100-9110"), "line 6: node a: port 9000 is outside port_range, 9100-9110. Take one within, or widen port_range."),
    (cluster(A, model=""), 'line 3: [cluster]: model is empty, too long, or holds a control character. Write 1 to 4096 printable characters, like "smollm2-135m".'),
    (cluster(A, secret_file="s", previous_secret_file="s"), "line 4: [cluster]: secret_file and previous_secret_file are one file. Leave previous_secret_file out until the secret changes."),
    (cluster(A, secret_file="s", previous_secret_file="./s"), "line 4: [cluster]: secret_file and previous_secret_file are one file. Leave previous_secret_file out until the secret changes."),
    (cluster(A, expert_parallel=True), "line 3: [cluster]: expert_parallel has nothing to spread experts over: data_parallel_size is 1. Set it to 2 or more, or leave expert_parallel out."),
    (cluster(*mesh(1, 2, "tp"), tensor_parallel_size=2, expert_parallel=True), "line 4: [cluster]: expert_parallel is for nodes that have attention whole, and tensor_parallel_size 2 cuts it. Make the nodes hybrid, with data_parallel_size = 2 alone, or leave expert_parallel out."),
    (cluster(*mesh(2, 1, "pipeline"), pipeline_parallel_size=2, expert_parallel=True), "line 4: [cluster]: expert_parallel in each of 2 pipeline stages is not there yet. Make the nodes hybrid, with data_parallel_size = 2 alone, or leave expert_parallel out."),
    # Names.
    (cluster(A, name=""), 'line 3: [cluster]: name has 0 bytes of UTF-8; 1 to 128 are allowed. Write 1 to 128 bytes of printable text, like "lab".'),
    (cluster(A, name="a\\tb"), 'line 3: [cluster]: name \'a\\tb\' holds a control character. Write 1 to 128 bytes of printable text, like "lab".'),
    (cluster(node("", "h:1")), 'line 4: node 1: id has 0 bytes of UTF-8; 1 to 128 are allowed. Write 1 to 128 bytes of printable text, like "mac1".'),
    (cluster(node("é" * 65, "h:1")), 'line 4: node ' + "é" * 65 + ': id has 130 bytes of UTF-8; 1 to 128 are allowed. Write 1 to 128 bytes of printable text, like "mac1".'),
    (cluster("[[nodes]]\naddress = 'h:1'"), "line 3: node 1: id is missing. The node's name, unlike any other's. Write it as 1 to 128 bytes of printable text."),
    (cluster(A, node("a", "h2:9000")), "line 8: node a: 2 nodes have this id (lines 4, 8). Give each node an id of its own."),
    # Addresses.
    (cluster("[[nodes]]\nid = 'a'"), "line 3: node a: address is missing. Where it listens and is reached; the port may be left out with beacons. Write it as HOST:PORT, [IPV6]:PORT."),
    (cluster(node("a", "h1")), 'line 5: node a: address lacks a port. Write "h1:9000", or set discovery = "beacon", by which nodes tell their ports.'),
    (cluster(node("a", "fd00::1:9000")), 'line 5: node a: address lacks a port. Write "[fd00::1:9000]:9000", or set discovery = "beacon", by which nodes tell their ports.'),
    (cluster(node("a", "h1:90000")), 'line 5: node a: address port 90000 is not between 0 and 65535. Write it as HOST:PORT, [IPV6]:PORT.'),
    (cluster(node("a", "not a host:1")), "line 5: node a: address 'not a host' is not a host name or an IP address. Write it as HOST:PORT, [IPV6]:PORT."),
    (cluster(A, node("b", "H1.:9000")), "line 9: node a and node b: address h1:9000 is given 2 times. Give each a port or a host of its own."),
    (cluster(node("a", "10.0.0.1:1"), node("b", "[::ffff:10.0.0.1]:1")), "line 9: node a and node b: address 10.0.0.1:1 is given 2 times. Give each a port or a host of its own."),
    (cluster(node("a", "0.0.0.0:1")), "line 5: node a: 0.0.0.0 means every interface, and nobody can dial it. Write the address by which the other hosts reach it."),
    (cluster(node("a", "239.1.2.3:1")), "line 5: node a: 239.1.2.3 is a multicast address. Write the address of one host."),
    (cluster(node("a", "[fe80::1]:1")), "line 5: node a: fe80::1 is link-local and lacks its interface, as in [fe80::1%en0]:9000. Write the address of one host."),
    (cluster(HYBRIDS, node("c", "[fd93::3]:1")), "line 13: node c: fd93::3 is IPv6, and node a's address, 10.93.0.1, IPv4. Write addresses of one family for all nodes, or names that lead to both."),
    (cluster(HYBRIDS.replace("10.93.0.1:", "[fd93::1%eth0]:").replace("10.93.0.2:", "[fd93::2]:"), node("c", "10.93.0.3:1")), "line 13: node c: 10.93.0.3 is IPv4, and node a's address, fd93::1%eth0, IPv6. Write addresses of one family for all nodes, or names that lead to both."),
    (cluster(node("a", "10.0.0.256:1")), "line 5: node a: address '10.0.0.256' is not an IPv4 address. Write four numbers up to 255."),
    # Roles.
    (cluster(node("a", "h:1", role="prefil")), "line 6: node a: role 'prefil' is not a role. Perhaps prefill?"),
    (cluster(node("a", "h:1", role="pp")), "line 6: node a: role 'pp' is not a role. Perhaps pipeline?"),
    (cluster(node("a", "h:1", role="router")), "line 6: node a: role 'router' belongs on a command line, not into a file. Leave it out of the file and start it by itself: mlxcel-nb node --node-role router"),
    (cluster(*STAGES), "line 2: [cluster]: node s0 and node s1 are pipeline_stage, but pipeline_parallel_size is 1. Set pipeline_parallel_size = 2."),
    (cluster(*STAGES, pipeline_parallel_size=2, tensor_parallel_size=2), "line 4: [cluster]: node s0 and node s1 are pipeline_stage, but tensor_parallel_size is 2. Make the role pipeline_tensor_parallel, with stage and rank, or set tensor_parallel_size = 1."),
    (cluster(*mesh(1, 2, "2d"), tensor_parallel_size=2), "line 2: [cluster]: node n00 and node n01 are pipeline_tensor_parallel, but pipeline_parallel_size is 1. Set pipeline_parallel_size = 2, or make the role tensor_parallel_rank."),
    (cluster(node("a", "h:1", stage=1)), "line 6: node a: stage 1 does not exist: pipeline_parallel_size is 1. Write stage = 0, or leave it out."),
    (cluster(node("a", "h:1", layers="0-3")), "line 6: node a: a hybrid node holds a whole model, and no layers by hand. Leave layers out."),
    (cluster(node("a", "h:1", group="g")), "line 6: node a: group is for prefill and decode nodes, and this one is hybrid. Leave group out."),
    (cluster(node("a", "h:1", role="prefill")), '[[nodes]]: there are prefill nodes, but no decode node. Add one with role = "decode", or make the others hybrid.'),
    (cluster(A, B, tensor_parallel_size=2), 'line 2: [cluster]: a mesh of 2 ranks is asked for, but node a and node b hold no place in it. Give 2 nodes role = "tensor_parallel_rank" with rank, or set the sizes to 1.'),
    (cluster(*STAGES, node("c", "h3:9000", rank=0), pipeline_parallel_size=2), 'line 19: node c: a hybrid node holds a whole model, and has no rank. Write role = "pipeline_stage", or leave rank out.'),
    (cluster(node("a", "h1:1", role="prefill", group="g"), node("b", "h2:1", role="decode", group="g"), node("c", "h3:1", role="decode")), 'line 13: node b: group g holds prefill nodes, and this one is decode. Give it another group.'),
    # Places.
    (cluster(*STAGES, pipeline_parallel_size=3), "the mesh: stage 2 is held by no node. Add a node for it."),
    (cluster(STAGES[0], pipeline_parallel_size=512), "the mesh: stage 1; stage 2; stage 3; stage 4; stage 5; stage 6 and 505 more are held by no node. Add a node for each."),
    (cluster(*mesh(2, 2, "2d")[:3], tensor_parallel_size=2, pipeline_parallel_size=2), "the mesh: stage 1, rank 1 is held by no node. Add a node for it."),
    (cluster(*STAGES, node("c", "h3:9000", role="pipeline", stage=1), pipeline_parallel_size=2), 'line 16: node s1 and node c: stage 1 of the mesh is held 2 times. Give each a place of its own.'),
    (cluster(STAGES[0], node("c", "h3:9000", role="pipeline", stage=2), pipeline_parallel_size=2), 'line 14: node c: stage 2 does not exist: pipeline_parallel_size is 2. Write stage = 0, or up to 1.'),
    (cluster(STAGES[0], node("c", "h3:9000", role="pipeline"), pipeline_parallel_size=2), 'line 10: node c: stage is missing: pipeline_parallel_size is 2. Write stage = 0, or up to 1.'),
    (cluster(A, B, data_parallel_size=3), "line 3: [cluster]: data_parallel_size is 3, but no node is in replica 2. Add nodes for it, or lower data_parallel_size."),
    (cluster(A, B, node("c", "h3:1"), data_parallel_size=2), "line 12: node c: data_parallel_size is 2, and so many replicas have a node already. Raise data_parallel_size, or take the node out."),
    (cluster(node("a", "h1:1", role="prefill"), node("b", "h2:1", role="decode"), data_parallel_size=2), "line 3: [cluster]: data_parallel_size is 2, but there is no mesh to repeat: all nodes are in groups. Leave it out; several groups do the same for prefill and decode."),
    (cluster(node("p", "h1:1", role="prefill", rank=0), node("q", "h2:1", role="prefill", rank=1), node("d", "h3:1", role="decode", rank=0), tensor_parallel_size=2), "group decode-0: rank 1 is held by no node. Add a node for it."),
    # Layers.
    (stages("0-15", "15-29"), 'line 16: node s1: layers 15-29 of stage 1 overlap: stage 0 ends at layer 15. Begin them at 16, and let stages follow each other.'),
    (stages("0-15", "17-29"), 'line 16: node s1: layers 17-29 of stage 1 leave a gap: stage 0 ends at layer 15. Begin them at 16, and let stages follow each other.'),
    (stages("1-15", "16-29"), "line 9: node s0: layers 1-15 of stage 0 leave a gap: the first layer is 0. Begin them at 0, and let stages follow each other."),
    (stages("0-15", None), 'line 11: node s1: layers is missing, but other nodes of the mesh have them by hand. Write layers for every node of it, or for none.'),
    (stages("0-15", "all"), 'line 16: node s1: layers \'all\' is not a layer range. Write the first and the last layer, from 0 to 9999, like "0-15".'),
    (stages("0-15", "29-16"), 'line 16: node s1: layers \'29-16\' is not a layer range. Write the first and the last layer, from 0 to 9999, like "0-15".'),
    # Spares.
    (cluster(A, node("b", "h2:1", spare=True)), 'line 2: [cluster]: node b is spare, but is never used while elastic is "off". Set elastic = "spare", or leave spare out.'),
    (cluster(A, elastic="spare"), "line 3: [cluster]: elastic is on, but no node is spare. Write spare = true for a node."),
    (cluster(A, node("b", "h2:1", spare=True, rank=0), elastic="replan"), "line 12: node b: a spare node has no rank of its own. Leave rank or spare out."),
    (cluster(node("b", "h2:1", spare=True), elastic="spare"), "[[nodes]]: every node is spare, and none holds a model. Leave spare out for those that do the work."),
]  # fmt: skip
