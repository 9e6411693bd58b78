"""The node's certificates: one authority for this checkout, one certificate a component, made once and kept."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from local.node import layout

_LIFETIME = datetime.timedelta(days=3650)
_Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True)
class Identity:
    """A certificate to issue: file name, common name, group, and for servers the names they answer to."""

    name: str
    common_name: str
    organization: str = ""
    hosts: tuple[str, ...] = ()


_APISERVER_HOSTS = (
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "localhost",
    "127.0.0.1",
    layout.API_SERVICE,
    layout.NODE_ADDRESS,
)

IDENTITIES = (
    Identity("apiserver", "kube-apiserver", hosts=_APISERVER_HOSTS),
    Identity("apiserver-kubelet-client", "kube-apiserver-kubelet-client", "system:masters"),
    Identity("front-proxy-client", "front-proxy-client"),
    Identity("admin", "admin", "system:masters"),
    Identity("kube-controller-manager", "system:kube-controller-manager"),
    Identity("kube-scheduler", "system:kube-scheduler"),
    Identity("kube-proxy", "system:kube-proxy"),
    Identity("network-policy", "trainyard:network-policy", "system:masters"),
    Identity("kubelet", f"system:node:{layout.NODE}", "system:nodes", (layout.NODE, layout.NODE_ADDRESS)),
)

KUBECONFIGS = ("admin", "kube-controller-manager", "kube-scheduler", "kube-proxy", "network-policy", "kubelet")


def provide() -> None:
    """Make every key, certificate and kubeconfig that is missing."""
    layout.PKI.mkdir(parents=True, exist_ok=True)
    layout.PKI.chmod(0o700)
    layout.CONFIG.mkdir(parents=True, exist_ok=True)
    authority, authority_key = _authority()
    for identity in IDENTITIES:
        if not certificate(identity.name).exists():
            _issue(identity, authority, authority_key)
    if not key("service-account").exists():
        account = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        _write(key("service-account"), _private_pem(account))
        public = account.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        _write(layout.PKI / "service-account.pub", public)
    for user in KUBECONFIGS:
        path = layout.KUBECONFIG if user == "admin" else layout.kubeconfig(user)
        if not path.exists():
            _write(path, yaml.safe_dump(_kubeconfig(user)).encode())


def certificate(name: str) -> Path:
    """Return the file of a certificate."""
    return layout.PKI / f"{name}.crt"


def key(name: str) -> Path:
    """Return the file of a private key."""
    return layout.PKI / f"{name}.key"


def _authority() -> tuple[x509.Certificate, _Key]:
    if certificate("ca").exists():
        loaded = serialization.load_pem_private_key(key("ca").read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        return x509.load_pem_x509_certificate(certificate("ca").read_bytes()), loaded
    private = ec.generate_private_key(ec.SECP256R1())
    name = _name("trainyard local authority")
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    signed = (
        _builder(name, name, private)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
        .sign(private, hashes.SHA256())
    )
    _write(key("ca"), _private_pem(private))
    _write(certificate("ca"), signed.public_bytes(serialization.Encoding.PEM))
    return signed, private


def _issue(identity: Identity, authority: x509.Certificate, authority_key: _Key) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if identity.hosts else [])]
    builder = _builder(_name(identity.common_name, identity.organization), authority.subject, private)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = builder.add_extension(issuer_key, critical=False)
    if identity.hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in identity.hosts]), critical=False)
    signed = builder.sign(authority_key, hashes.SHA256())
    _write(key(identity.name), _private_pem(private))
    _write(certificate(identity.name), signed.public_bytes(serialization.Encoding.PEM))


def _builder(subject: x509.Name, issuer: x509.Name, private: _Key) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _LIFETIME)
    )


def _name(common_name: str, organization: str = "") -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization)] if organization else []
    return x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private_pem(private: _Key) -> bytes:
    form = serialization.PrivateFormat.TraditionalOpenSSL
    return private.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as handle:
        handle.write(content)
    staged.replace(path)


def _kubeconfig(user: str) -> dict[str, object]:
    def embedded(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "trainyard", "cluster": {"server": layout.API, "certificate-authority-data": embedded(certificate("ca"))}}],
        "users": [
            {
                "name": user,
                "user": {"client-certificate-data": embedded(certificate(user)), "client-key-data": embedded(key(user))},
            }
        ],
        "contexts": [{"name": "trainyard", "context": {"cluster": "trainyard", "user": user}}],
        "current-context": "trainyard",
    }
