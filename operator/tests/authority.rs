//! A20: the API server comes back with a certificate of another authority, on real sockets with real TLS. It is believed once the file of the
//! authorities says so, by the same client; until then it is not, and its old one is not any more after that.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test program; the lint sees test functions alone")]

use std::{
    fs,
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use operator::{
    client::{CallError, Calls},
    connect,
    leader::Leadership,
    metrics::Metrics,
};
use rustls::{
    ServerConfig, ServerConnection, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use serde_json::json;

/// kube reads the file once a minute.
const READ_BY: Duration = Duration::from_secs(75);

/// The text of a file of `authority/`, whose certificates are for 127.0.0.1 and last for a hundred years.
fn text(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/authority").join(name)).unwrap()
}

/// A server's certificate and key, of the old authority or the new one.
fn proof_of(authority: &str) -> Arc<ServerConfig> {
    let certificate = CertificateDer::from_pem_slice(&text(&format!("{authority}-server.pem"))).unwrap();
    let key = PrivateKeyDer::from_pem_slice(&text(&format!("{authority}-server.key"))).unwrap();
    Arc::new(ServerConfig::builder().with_no_client_auth().with_single_cert(vec![certificate], key).unwrap())
}

/// An API server of one ConfigMap, and what it proves itself by.
struct Server {
    port: u16,
    proof: Arc<Mutex<Arc<ServerConfig>>>,
}

impl Server {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let proof = Arc::new(Mutex::new(proof_of("old")));
        let own = proof.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let proof = own.lock().unwrap().clone();
                thread::spawn(move || answer(stream, proof)); // who does not believe it hangs up
            }
        });
        Server { port, proof }
    }

    fn becomes(&self, authority: &str) {
        *self.proof.lock().unwrap() = proof_of(authority);
    }
}

/// One request to a connection, so that the next one asks for the certificate again.
fn answer(stream: TcpStream, proof: Arc<ServerConfig>) -> io::Result<()> {
    let mut stream = StreamOwned::new(ServerConnection::new(proof).map_err(io::Error::other)?, stream);
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.extend(byte);
    }
    let body = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}).to_string();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length:";
    write!(stream, "{head} {}\r\n\r\n{body}", body.len())?;
    stream.conn.send_close_notify();
    stream.flush()
}

async fn ask(client: &Client) -> Result<(), CallError> {
    let calls = Calls::new(client.clone(), Arc::new(Leadership::default()), Arc::new(Metrics::new().unwrap()));
    calls.get(&Api::<ConfigMap>::namespaced(client.clone(), "default"), "a").await.map(drop)
}

/// Clients of a kubeconfig that names the file of its authorities, and of what kube makes of a pod's service account.
async fn clients(port: u16, authorities: &Path) -> [Client; 2] {
    let (url, file) = (format!("https://127.0.0.1:{port}"), authorities.display());
    let kubeconfig = Kubeconfig::from_yaml(&format!(
        "{{apiVersion: v1, kind: Config, current-context: c, contexts: [{{name: c, context: {{cluster: c, user: u}}}}], \
         clusters: [{{name: c, cluster: {{server: '{url}', certificate-authority: '{file}'}}}}], users: [{{name: u, user: {{token: t}}}}]}}"
    ));
    let kubeconfig = kubeconfig.unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig.clone(), &KubeConfigOptions::default()).await.unwrap();
    let mut in_pod = Config::new(url.parse().unwrap());
    in_pod.root_cert = Some(vec![CertificateDer::from_pem_slice(&text("old-ca.pem")).unwrap().to_vec()]);
    in_pod.root_cert_file = Some(authorities.to_owned());
    [connect::client_of(config, Some(&kubeconfig)).unwrap(), connect::client_of(in_pod, None).unwrap()]
}

#[tokio::test]
async fn fault_a20_a_server_of_a_new_authority_is_believed_once_the_file_says_so() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let authorities = folder.path().join("ca.crt");
    fs::write(&authorities, text("old-ca.pem")).unwrap();
    let server = Server::start();
    let clients = clients(server.port, &authorities).await;
    for client in &clients {
        ask(client).await.unwrap();
    }
    server.becomes("new");
    for client in &clients {
        ask(client).await.expect_err("nobody has said that it is the same server");
    }
    let (next, since) = (folder.path().join("next"), Instant::now());
    fs::write(&next, text("new-ca.pem")).unwrap();
    fs::rename(next, &authorities).unwrap(); // as whole as what the kubelet does
    for client in &clients {
        while let Err(error) = ask(client).await {
            assert!(since.elapsed() < READ_BY, "{error}");
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
    server.becomes("old");
    for client in &clients {
        ask(client).await.expect_err("its authority is none any more");
    }
}
