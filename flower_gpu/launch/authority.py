"""A certificate authority for one run: it certifies the run's parts, and nobody else's.

Its private key is in no file: it is in the memory of the launcher, which drops it when all parts of the run
have their certificates. So nobody can make another certificate that the parts of this run would take.
"""

from __future__ import annotations

import datetime
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from flower_gpu.launch.ports import HOST

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

# Clocks of one host do not differ, but one may be set back while the run goes on.
_EARLIER: Final = datetime.timedelta(hours=1)
# Longer than any run, since a certificate cannot be renewed while a part runs.
_VALID: Final = datetime.timedelta(days=365)


class Authority:
    """Makes certificates by which the parts of one run on this host know each other."""

    def __init__(self) -> None:
        from cryptography import x509  # here: it takes a while, and most launches need none
        from cryptography.hazmat.primitives.asymmetric import ec

        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("flower-gpu, the authority of one run")
        unsigned = (
            _unsigned(self._name, self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True), critical=True)
        )
        self._certificate = self._signed(unsigned)

    @property
    def certificate(self) -> bytes:
        """Its certificate in PEM: what each part of the run trusts, and nothing else."""
        return _pem(self._certificate)

    def issue(self, part: str) -> bytes:
        """Make a key and a certificate for a part of the run; return both in PEM, the key first.

        They are good for a server at the loopback address, and for a client.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(HOST)), x509.DNSName("localhost")])
        usages = x509.ExtendedKeyUsage(
            [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH, x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]
        )
        unsigned = (
            _unsigned(_name(part), self._name, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(usages, critical=False)
            .add_extension(names, critical=False)
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return private + _pem(self._signed(unsigned))

    def _signed(self, unsigned: x509.CertificateBuilder) -> x509.Certificate:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return unsigned.add_extension(own, critical=False).sign(self._key, hashes.SHA256())


def _unsigned(subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(text: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _usage(digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)
