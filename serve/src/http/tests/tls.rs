//! Encrypted connections.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::{Reply, Server, chat};
use crate::engine::Settings;
use crate::http::{HttpSettings, Tls};
use crate::tests::alphabet::Alphabet;

/// A certificate of `localhost` that vouches for itself, for a hundred years.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/http/tests/tls").join(name)
}

#[test]
fn answers_are_encrypted_and_nothing_else_is_answered() {
    let tls = Some(Tls::read(&file("cert.pem"), &file("key.pem")).unwrap());
    let server =
        Server::with(Alphabet::new(), Settings::default(), HttpSettings { tls, ..HttpSettings::default() });
    let mut plain = Vec::new();
    let _ = server.send("GET", "/health", "", b"").read_to_end(&mut plain);
    assert!(!String::from_utf8_lossy(&plain).contains("200"));
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(file("cert.pem")).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    let config = Arc::new(config.with_no_client_auth());
    let client = ClientConnection::new(config, "localhost".try_into().unwrap()).unwrap();
    let mut stream = StreamOwned::new(client, server.connect());
    let body = chat("a", json!({"max_tokens": 5, "stream": true})).to_string();
    let n = body.len();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {n}\r\n\r\n"
    );
    stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    assert_eq!(Reply::parse(&bytes).events().last(), Some(&json!("[DONE]")));
    server.join();
}

#[test]
fn files_that_are_no_certificate_or_no_key_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().join("empty");
    std::fs::write(&empty, "").unwrap();
    let damaged = dir.path().join("damaged");
    std::fs::write(&damaged, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
    let absent = dir.path().join("absent");
    for (certificate, key, word) in [
        (&absent, &file("key.pem"), "absent"),
        (&file("cert.pem"), &absent, "absent"),
        (&empty, &file("key.pem"), "has no certificate"),
        (&file("cert.pem"), &empty, "has no private key"),
        (&file("cert.pem"), &file("cert.pem"), "has no private key"),
        (&damaged, &file("key.pem"), "does not go with"),
    ] {
        let line = Tls::read(certificate, key).unwrap_err();
        assert!(line.contains(word) && line.lines().count() == 1, "{line}");
    }
}
