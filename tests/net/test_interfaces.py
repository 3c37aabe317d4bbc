"""What the systems' answers mean. Not run on Thunderbolt hardware: the answers below were written for these tests, in
the forms that these documents describe.

* `networksetup -listallhardwareports`: three lines a port, "Hardware Port", "Device", "Ethernet Address" (the man
  page networksetup(8); Super User 267660 shows a whole one with "Thunderbolt 1" and "Thunderbolt Bridge").
* `ifconfig` on macOS: ifconfig(8), with "member:", "media:" and "status:" lines (Ask Different 212202).
* `system_profiler SPThunderboltDataType -json`: the keys that MLX's own `mlx.distributed_config` reads
  (domain_uuid_key, receptacle_1_tag with receptacle_id_key, _items), and current_speed_key ("Up to 40 Gb/s").
* `rdma_ctl`, `ibv_devices`, names such as rdma_en2, macOS 26.2, Thunderbolt 5: Apple's technote TN3205.
* /sys/class/net: Documentation/ABI/testing/sysfs-class-net; ARPHRD_* of linux/if_arp.h; the driver's name is that of
  drivers/net/thunderbolt; rx_speed and rx_lanes: Documentation/ABI/testing/sysfs-bus-thunderbolt.
"""

from __future__ import annotations

import json
import socket
import sys

import pytest

from mlxcel_nb.cluster.places import Interface
from mlxcel_nb.cluster.transports import advise
from mlxcel_nb.net.interfaces import probe as interfaces
from mlxcel_nb.net.interfaces.facts import (
    GIGA,
    LinuxLink,
    MacFacts,
    linux_kind,
    linux_speed,
    media_speed,
    parse_devices,
    parse_hardware_ports,
    parse_ifconfig,
    parse_rdma,
    parse_release,
    parse_speed,
    parse_thunderbolt,
    thunderbolt_generation,
)
from tests.hosts import hosts

# ------------------------------------------------------------------------------------------ macOS

PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 02:00:00:00:00:01

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 02:00:00:00:00:02

Hardware Port: Thunderbolt 1
Device: en2
Ethernet Address: 02:00:00:00:00:03

Hardware Port: Thunderbolt 2
Device: en3
Ethernet Address: 02:00:00:00:00:04

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 02:00:00:00:00:03

Hardware Port: Thunderbolt Ethernet Slot 1
Device: en7
Ethernet Address: 02:00:00:00:00:05

Hardware Port: Bluetooth PAN
Device: en8
Ethernet Address: N/A

VLAN Configurations
===================
"""

IFCONFIG = """\
lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
	inet 127.0.0.1 netmask 0xff000000
	inet6 ::1 prefixlen 128
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
	ether 02:00:00:00:00:01
	inet 192.168.1.2 netmask 0xffffff00 broadcast 192.168.1.255
	media: autoselect (10Gbase-T <full-duplex,flow-control>)
	status: active
en1: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
	media: autoselect
	status: inactive
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
	Configuration:
		id 0:0:0:0:0:0 priority 0 hellotime 0 fwddelay 0
		ipfilter disabled flags 0x0
	member: en2 flags=3<LEARNING,DISCOVER>
		ifmaxaddr 0 port 9 priority 0 path cost 0
	member: en3 flags=3<LEARNING,DISCOVER>
		ifmaxaddr 0 port 10 priority 0 path cost 0
	media: <unknown type>
	status: active
bridge100: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
	member: vmenet0 flags=3<LEARNING,DISCOVER>
utun3: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu 1280
awdl0: flags=8943<UP,BROADCAST,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1484
"""


def bus(number, speed, *, host=False, device=False):
    items = [{"_name": "Mac", "domain_uuid_key": "U9"}] if host else [{"_name": "Dock"}] if device else []
    state = "receptacle_connected" if items else "receptacle_no_devices_connected"
    tag = {"receptacle_id_key": str(number), "receptacle_status_key": state, "current_speed_key": speed}
    return {
        "_name": f"thunderboltusb4_bus_{number}",
        "device_name_key": "Mac",
        "domain_uuid_key": f"U{number}",
        "receptacle_1_tag": tag,
        **({"_items": items} if items else {}),
    }


def thunderbolt(*buses):
    return json.dumps({"SPThunderboltDataType": list(buses)})


TB5 = thunderbolt(bus(1, "80 Gb/s", host=True), bus(2, "Up to 120 Gb/s"), bus(3, "Up to 40 Gb/s", device=True))
IBV = """\
    device                 node GUID
    ------              ----------------
    rdma_en2            8010150505050505
    rdma_en3            8010150606060606
"""


def mac(ports=PORTS, ifconfig=IFCONFIG, profile=TB5):
    return MacFacts(
        ports=parse_hardware_ports(ports), links=parse_ifconfig(ifconfig), thunderbolt=parse_thunderbolt(profile)
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lo0", "loopback"),
        ("en0", "wired"),
        ("en1", "wifi"),
        ("en2", "thunderbolt"),
        ("bridge0", "thunderbolt"),
        ("en7", "wired"),  # an adapter on a Thunderbolt port
        ("en8", "other"),
        ("bridge100", "virtual"),
        ("utun3", "vpn"),
        ("awdl0", "virtual"),
        ("en12", "other"),  # not a port of the machine
    ],
)
def test_a_macs_interfaces_have_kinds(name, kind) -> None:
    assert mac().kind(name) == kind


def test_a_bridge_of_thunderbolt_ports_is_one_even_without_its_usual_name() -> None:
    ports = PORTS.replace("Hardware Port: Thunderbolt Bridge\nDevice: bridge0", "")
    assert mac(ports).kind("bridge0") == "thunderbolt"
    assert mac("").kind("bridge0") == "virtual"


def test_a_macs_speeds_are_its_medium_and_the_plugged_in_ports() -> None:
    assert mac().speed("en0") == 10 * GIGA
    assert mac().speed("bridge0") == mac().speed("en2") == 80 * GIGA
    assert mac().speed("en3") == mac().speed("en1") == mac().speed("en99") == 0
    assert [
        media_speed(m) for m in ("autoselect (1000baseT <full-duplex>)", "2500Base-T", "100baseTX", "autoselect")
    ] == [
        GIGA,
        2_500_000_000,
        100_000_000,
        0,
    ]


def test_thunderbolt_ports_are_read_and_the_generation_guessed_from_their_speed() -> None:
    ports = parse_thunderbolt(TB5)
    assert [(p.number, p.speed_bps // GIGA, p.connected, p.host) for p in ports] == [
        ("1", 80, True, True),
        ("2", 120, False, False),
        ("3", 40, True, False),
    ]
    assert thunderbolt_generation(ports) == 5
    assert thunderbolt_generation(parse_thunderbolt(thunderbolt(bus(1, "Up to 40 Gb/s")))) == 3
    assert thunderbolt_generation([]) == 0


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"SPThunderboltDataType": 3}', '{"SPThunderboltDataType": [4, {}]}', "{"]
)
def test_answers_of_another_form_say_nothing(text) -> None:
    assert parse_thunderbolt(text) == []
    assert parse_hardware_ports(text) == {}
    assert parse_ifconfig(text) == {}
    assert parse_devices(text) == ()
    assert parse_rdma(text) == ""


def test_rdma_is_on_off_or_absent() -> None:
    assert [parse_rdma(said) for said in ("enabled\n", "disabled\n", None, "error: no")] == ["on", "off", "", ""]
    assert parse_devices(IBV) == ("rdma_en2", "rdma_en3")
    assert parse_devices("    device                 node GUID\n    ------              ----------------\n") == ()
    assert [parse_release(text) for text in ("26.2", "15.7.1", "", "x")] == [(26, 2), (15, 7, 1), (), ()]


def answers(**changed):
    said = {
        "networksetup": PORTS,
        "ifconfig": IFCONFIG,
        "system_profiler": TB5,
        "rdma_ctl": "enabled\n",
        "ibv_devices": IBV,
    }
    return {**said, **changed}


def made(kinds, speeds):
    """As the probe makes them, of addresses that psutil would have named."""
    has = {"lo0": ("127.0.0.1/8",), "en0": ("192.168.1.2/24",), "bridge0": ("10.1.0.1/24",)}
    return tuple(Interface(name=n, kind=kinds[n], addresses=has.get(n, ()), speed_bps=speeds[n]) for n in sorted(kinds))


@pytest.mark.parametrize(
    ("changed", "release", "transport", "words"),
    [
        ({}, (26, 3), "rdma", ""),
        ({"rdma_ctl": "disabled\n", "ibv_devices": ""}, (26, 3), "thunderbolt", "rdma_ctl enable"),
        ({"rdma_ctl": None, "ibv_devices": None}, (15, 7), "thunderbolt", "comes with macOS 26.2"),
        (
            {
                "rdma_ctl": "disabled\n",
                "ibv_devices": "",
                "system_profiler": thunderbolt(bus(1, "40 Gb/s", host=True)),
            },
            (26, 3),
            "thunderbolt",
            "",
        ),
        (
            {
                "rdma_ctl": None,
                "ibv_devices": None,
                "system_profiler": thunderbolt(),
                "networksetup": PORTS.replace("Thunderbolt Bridge", "Bridge").replace("Thunderbolt 1", "Ethernet 1"),
            },
            (26, 3),
            "tcp",
            "",
        ),
    ],
)
def test_a_mac_from_its_answers_to_its_advice(changed, release, transport, words) -> None:
    """Case 62."""
    host = interfaces.mac_facts(answers(**changed), release, made)
    found = advise(host)
    assert found.transport == transport
    assert words in " ".join(found.advice)
    assert bool(found.advice) == bool(words)
    assert host.missing == ()


def test_what_was_not_answered_is_named() -> None:
    host = interfaces.mac_facts(answers(networksetup=None, system_profiler=None), (26, 3), made)
    assert host.missing == ("networksetup: no answer", "system_profiler: no answer")


# ------------------------------------------------------------------------------------------ Linux

LINKS = {
    link.name: link
    for link in (
        LinuxLink(name="lo", type=772),
        LinuxLink(name="enp3s0", driver="igc", speed_mbit=2500),
        LinuxLink(name="wlp2s0", driver="iwlwifi", devtype="wlan", wireless=True, speed_mbit=-1),
        LinuxLink(name="thunderbolt0", driver="thunderbolt-net", lane_speed="20.0 Gb/s", lanes=2),
        LinuxLink(name="ib0", type=32, driver="mlx5_core"),
        LinuxLink(name="wg0", type=65534, devtype="wireguard"),
        LinuxLink(name="tailscale0", type=65534, driver="tun", tun_flags=0x1001),
        LinuxLink(name="tap0", driver="tun", tun_flags=0x1002),
        LinuxLink(name="ppp0", type=512),
        LinuxLink(name="sit0", type=776),
        LinuxLink(name="dummy0", driver="dummy"),
        LinuxLink(name="veth1", driver="veth"),
        LinuxLink(name="docker0", driver="bridge", devtype="bridge", below=("veth1",)),
        LinuxLink(name="virbr0", driver="bridge", devtype="bridge"),
        LinuxLink(name="br0", driver="bridge", devtype="bridge", below=("enp3s0", "tap0")),
        LinuxLink(name="brtb", driver="bridge", devtype="bridge", below=("thunderbolt0",)),
        LinuxLink(name="bond0", devtype="bond", below=("enp3s0",)),
        LinuxLink(name="vlan7", devtype="vlan", below=("br0",)),
        LinuxLink(name="loop0", devtype="vlan", below=("loop1",)),
        LinuxLink(name="loop1", devtype="vlan", below=("loop0",)),
        LinuxLink(name="can0", type=280),
    )
}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("loopback", "lo"),
        ("wired", "enp3s0 ib0 br0 bond0 vlan7 veth1"),
        ("wifi", "wlp2s0"),
        ("thunderbolt", "thunderbolt0 brtb"),
        ("vpn", "wg0 tailscale0 ppp0 sit0"),
        ("virtual", "tap0 dummy0 docker0 virbr0 loop0"),
        ("other", "can0"),
    ],
)
def test_linux_interfaces_have_kinds(kind, names) -> None:
    assert {name: linux_kind(LINKS[name], LINKS) for name in names.split()} == dict.fromkeys(names.split(), kind)


def test_linux_speeds() -> None:
    speeds = {name: linux_speed(LINKS[name], LINKS) for name in ("enp3s0", "wlp2s0", "thunderbolt0", "br0", "brtb")}
    assert speeds == {
        "enp3s0": 2_500_000_000,
        "wlp2s0": 0,
        "thunderbolt0": 40 * GIGA,
        "br0": 2_500_000_000,
        "brtb": 40 * GIGA,
    }
    assert [parse_speed(text) for text in ("Up to 120 Gb/s", "20.0 Gb/s", "480 Mb/s", "fast", "")] == [
        120 * GIGA,
        20 * GIGA,
        480_000_000,
        0,
        0,
    ]


# ------------------------------------------------------------------------------------------ here


def test_this_hosts_own_interfaces_are_found() -> None:
    found = interfaces.probe()
    loopback = next(i for i in found.interfaces if i.kind == "loopback")
    assert "127.0.0.1/8" in loopback.addresses
    assert loopback.up
    assert "127.0.0.1" in interfaces.own_addresses()
    assert interfaces.host_id() == interfaces.host_id()
    assert len(interfaces.host_id()) == 16
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing; the system names the address it would use
        except OSError:
            return  # a machine without a network
        assert sock.getsockname()[0] in interfaces.own_addresses()


PROBE = """
import json
from mlxcel_nb.net.interfaces.probe import host_id, probe
told = {i.name: [i.kind, list(i.addresses), i.up, i.mtu] for i in probe().interfaces}
print(json.dumps([host_id(), told]))
"""


def test_hosts_see_their_own_links_and_know_each_other_apart() -> None:
    with hosts(2, links=("eth0", "tb0")) as (a, b):
        a.run(["ip", "link", "set", "tb0", "mtu", "9000"])
        for name, kind in (("tun9", "tun"), ("tap9", "tap")):
            a.run(["ip", "tuntap", "add", "dev", name, "mode", kind])
        a.run(["ip", "link", "add", "br9", "type", "bridge"])
        a.down("eth0")
        (first, told), (second, _) = (json.loads(host.python(PROBE).stdout) for host in (a, b))
        assert first != second
        assert told["tb0"] == [
            "wired",
            [f"{a.addresses['tb0']}/24", f"{a.addresses6['tb0']}/64", "fe80::2:1/64"],
            True,
            9000,
        ]
        assert told["eth0"][2] is False  # no carrier
        assert (told["lo"][0], told["br9"][0]) == ("loopback", "virtual")
        if "tun9" in told:  # where the machine has /dev/net/tun
            assert (told["tun9"][0], told["tap9"][0]) == ("vpn", "virtual")


def test_the_command_shows_a_host_its_own_interfaces() -> None:
    """Case 62."""
    with hosts(1) as (a,):
        done = a.run([sys.executable, "-m", "mlxcel_nb", "net", "interfaces", "--json"])
        told = json.loads(done.stdout)
        assert {each["name"]: each["kind"] for each in told["interfaces"]} == {"eth0": "wired", "lo": "loopback"}
        assert told["transport"] == "tcp" and told["advice"] == []
