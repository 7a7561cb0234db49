"""Does a pod pass Kubernetes' Pod Security Standard `restricted`? Each control of its text, in its order.

https://kubernetes.io/docs/concepts/security/pod-security-standards/ ; `restricted` includes `baseline`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["violations"]

_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
_SECCOMP = ("RuntimeDefault", "Localhost")
_SELINUX_TYPES = (None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}


def violations(pod: dict[str, Any]) -> list[str]:
    """The controls that a pod breaks, each with where."""
    return [*_of_pod(pod), *_of_containers(pod)]


def _of_pod(pod: dict[str, Any]) -> Iterator[str]:
    spec = pod["spec"]
    context = spec.get("securityContext", {})
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"Host Namespaces: {name}"
    for volume in spec.get("volumes", []):
        if not set(volume) - {"name"} <= _VOLUMES:
            yield f"Volume Types: {volume['name']}"
    for sysctl in context.get("sysctls", []):
        if sysctl["name"] not in _SYSCTLS:
            yield f"Sysctls: {sysctl['name']}"
    for name in pod["metadata"].get("annotations", {}):
        if name.startswith("container.apparmor.security.beta.kubernetes.io/"):
            yield f"AppArmor: {name}"
    yield from _of_any_context("the pod", context)


def _of_containers(pod: dict[str, Any]) -> Iterator[str]:
    spec = pod["spec"]
    of_pod = spec.get("securityContext", {})
    for container in (
        *spec["containers"],
        *spec.get("initContainers", []),
        *spec.get("ephemeralContainers", []),
    ):
        name, context = container["name"], container.get("securityContext", {})
        yield from _of_any_context(name, context)
        if context.get("privileged"):
            yield f"Privileged Containers: {name}"
        if any(port.get("hostPort") for port in container.get("ports", [])):
            yield f"Host Ports: {name}"
        if context.get("procMount", "Default") != "Default":
            yield f"/proc Mount Type: {name}"
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"Privilege Escalation: {name}"
        if not context.get("runAsNonRoot", of_pod.get("runAsNonRoot")):
            yield f"Running as Non-root: {name}"
        if context.get("seccompProfile", of_pod.get("seccompProfile", {})).get("type") not in _SECCOMP:
            yield f"Seccomp: {name}"
        capabilities = context.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            yield f"Capabilities: {name}"


def _of_any_context(where: str, context: dict[str, Any]) -> Iterator[str]:
    if context.get("runAsNonRoot") is False:
        yield f"Running as Non-root: {where}"
    if context.get("runAsUser") == 0:
        yield f"Running as Non-root user: {where}"
    if context.get("seccompProfile", {"type": _SECCOMP[0]}).get("type") not in _SECCOMP:
        yield f"Seccomp: {where}"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield f"HostProcess: {where}"
    if context.get("appArmorProfile", {}).get("type") == "Unconfined":
        yield f"AppArmor: {where}"
    selinux = context.get("seLinuxOptions", {})
    if selinux.get("type") not in _SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield f"SELinux: {where}"
