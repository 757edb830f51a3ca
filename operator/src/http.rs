//! The operator's HTTP: `/livez` (this process), `/readyz` (watches in step and Lease seen; the body says what is not), `/metrics`.

use std::{net::SocketAddr, sync::Arc};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::net::TcpListener;

use crate::{health::Health, metrics::Metrics};

#[derive(Clone)]
struct Shared {
    health: Arc<Health>,
    metrics: Arc<Metrics>,
}

/// Binds; the caller serves.
pub async fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Serves until dropped.
pub async fn serve(listener: TcpListener, health: Arc<Health>, metrics: Arc<Metrics>) -> std::io::Result<()> {
    let app = Router::new()
        .route("/livez", get(|| async { "ok" }))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(exposition))
        .with_state(Shared { health, metrics });
    axum::serve(listener, app).await
}

async fn readyz(State(shared): State<Shared>) -> Response {
    let faults = shared.health.faults();
    if faults.is_empty() {
        return "ok".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", faults.join("\n"))).into_response()
}

async fn exposition(State(shared): State<Shared>) -> Response {
    match shared.metrics.text() {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leader::Leadership;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    async fn get_text(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test]
    async fn each_path_answers_for_what_it_is() {
        let (leadership, metrics) = (Arc::new(Leadership::default()), Arc::new(Metrics::new().unwrap()));
        let health = Arc::new(Health::new(leadership.clone(), metrics.clone()));
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, health, metrics));
        assert!(get_text(address, "/livez").await.starts_with("HTTP/1.1 200"));
        let unready = get_text(address, "/readyz").await;
        assert!(unready.starts_with("HTTP/1.1 503") && unready.contains("the Lease was never seen"), "{unready}");
        leadership.contact();
        assert!(get_text(address, "/readyz").await.starts_with("HTTP/1.1 200"));
        assert!(get_text(address, "/metrics").await.contains("truebeat_operator_leader 0"));
    }
}
