//! Encryption of connections. In: a certificate and its key, in PEM. Out: what takes a client's handshake.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Bytes of a file.
const LARGEST: u64 = 1 << 20;

/// A certificate with its key; connections are TLS 1.2 or 1.3.
#[derive(Clone, Debug)]
pub struct Tls {
    config: Arc<ServerConfig>,
}

impl Tls {
    /// Reads a certificate, those that vouch for it behind it, and its key.
    ///
    /// # Errors
    /// A file cannot be read or holds none, or they do not belong together; in one line.
    pub fn read(certificate: &Path, key: &Path) -> Result<Tls, String> {
        let wrong = |path: &Path, what: &dyn Display| format!("{}: {what}", path.display());
        let bytes = |path| astrai_files::read(path, LARGEST).map_err(|e| e.to_string());
        let chain = CertificateDer::pem_slice_iter(&bytes(certificate)?).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(|e| wrong(certificate, &e))?;
        if chain.is_empty() {
            return Err(wrong(certificate, &"has no certificate; give a file of PEM"));
        }
        let of_file = PrivateKeyDer::from_pem_slice(&bytes(key)?);
        let of_file = of_file.map_err(|e| wrong(key, &format!("has no private key in PEM ({e})")))?;
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()));
        let config = config.with_safe_default_protocol_versions().map_err(|e| e.to_string())?;
        let config = config.with_no_client_auth().with_single_cert(chain, of_file);
        let mut config =
            config.map_err(|e| wrong(key, &format!("does not go with the certificate ({e})")))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Tls { config: Arc::new(config) })
    }

    /// What takes handshakes.
    pub(super) fn acceptor(&self) -> TlsAcceptor {
        self.config.clone().into()
    }
}
