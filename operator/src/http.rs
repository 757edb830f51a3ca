//! The operator's HTTP: `/livez` (does its executor run), `/readyz` (watches in step and Lease seen; the body says what is not),
//! `/metrics`. On a thread of its own: it answers while everything else of the process is stuck in a call that blocks (B9).

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread,
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use role::{crowd, pulse::Pulse};
use tokio::{runtime, sync::oneshot};

use crate::{health::Health, metrics::Metrics};

/// What is told.
#[derive(Clone)]
pub struct Told {
    pub health: Arc<Health>,
    pub metrics: Arc<Metrics>,
    /// Of the executor that does the operator's work.
    pub pulse: Arc<Pulse>,
}

/// Binds; nothing is served yet.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = role::listen_in_pod(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves until the process ends. What comes out of the channel is why it ended before; a thread that is gone drops the other end.
pub fn serve(listener: TcpListener, told: Told) -> io::Result<oneshot::Receiver<io::Error>> {
    let (ended, why) = oneshot::channel();
    thread::Builder::new().name("http".to_owned()).spawn(move || {
        let own = runtime::Builder::new_current_thread().enable_all().build();
        if let Err(error) = own.and_then(|own| own.block_on(answer(listener, told))) {
            let _ = ended.send(error); // nobody listens: the operator is on its way out
        }
    })?;
    Ok(why)
}

async fn answer(listener: TcpListener, told: Told) -> io::Result<()> {
    let app = Router::new()
        .route("/livez", get(livez))
        .route("/healthz", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(exposition))
        .with_state(told);
    crowd::serve(tokio::net::TcpListener::from_std(listener)?, app).await;
    Ok(())
}

async fn livez(State(told): State<Told>) -> Response {
    told.pulse.answer().await
}

async fn readyz(State(told): State<Told>) -> Response {
    let faults = told.health.faults();
    if faults.is_empty() {
        return "ok".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", faults.join("\n"))).into_response()
}

async fn exposition(State(told): State<Told>) -> Response {
    match told.metrics.text() {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leader::Leadership;
    use std::{
        io::{Read, Write},
        net::TcpStream,
        sync::atomic::{AtomicBool, Ordering},
        time::{Duration, Instant},
    };

    const BOUND: Duration = Duration::from_secs(20);

    fn get_text(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    fn served(silence_max: Duration) -> (SocketAddr, Told, Arc<Leadership>) {
        served_at("127.0.0.1:0", silence_max)
    }

    fn served_at(listen: &str, silence_max: Duration) -> (SocketAddr, Told, Arc<Leadership>) {
        let (leadership, metrics) = (Arc::new(Leadership::default()), Arc::new(Metrics::new().unwrap()));
        let health = Arc::new(Health::new(leadership.clone(), metrics.clone()));
        let told = Told { health, metrics, pulse: Arc::new(Pulse::new(silence_max)) };
        let listener = bind(listen.parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        serve(listener, told.clone()).unwrap();
        (address, told, leadership)
    }

    #[test]
    fn each_path_answers_for_what_it_is() {
        let (address, told, leadership) = served(BOUND);
        assert!(get_text(address, "/livez").starts_with("HTTP/1.1 200"));
        let unready = get_text(address, "/readyz");
        assert!(unready.starts_with("HTTP/1.1 503") && unready.contains("the Lease was never seen"), "{unready}");
        leadership.contact();
        assert!(get_text(address, "/readyz").starts_with("HTTP/1.1 200"));
        told.health.watch("Pod", false);
        let unready = get_text(address, "/readyz");
        assert!(unready.starts_with("HTTP/1.1 503") && unready.contains("the watch of Pod is stale"), "{unready}");
        assert!(get_text(address, "/metrics").contains("truebeat_operator_leader 0"));
    }

    #[test]
    fn by_default_whoever_asks_is_answered_at_addresses_of_both_kinds() {
        let port = served_at("0.0.0.0:0", BOUND).0.port();
        let asked = |host: &str| get_text(format!("{host}:{port}").parse().unwrap(), "/livez");
        assert!(asked("127.0.0.1").starts_with("HTTP/1.1 200"));
        match TcpListener::bind("[::1]:0") {
            Ok(_) => assert!(asked("[::1]").starts_with("HTTP/1.1 200")),
            Err(_) => crate::not_run::not_run("there is no IPv6 here"),
        }
    }

    #[test]
    fn fault_b9_a_starved_executor_is_told_by_one_that_is_not() {
        let (address, told, _) = served(Duration::from_millis(500));
        let becomes = move |status: &str| {
            let since = Instant::now();
            while !get_text(address, "/livez").starts_with(&format!("HTTP/1.1 {status}")) {
                assert!(since.elapsed() < BOUND, "/livez never says {status}");
                thread::sleep(Duration::from_millis(10));
            }
        };
        let (well, over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (seen_well, seen) = (well.clone(), over.clone());
        let outside = thread::spawn(move || {
            becomes("200");
            seen_well.store(true, Ordering::Relaxed);
            becomes("503");
            let metrics = get_text(address, "/metrics");
            seen.store(true, Ordering::Relaxed);
            becomes("200");
            metrics
        });
        let blocks = async {
            let since = Instant::now();
            while !well.load(Ordering::Relaxed) && since.elapsed() < BOUND {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            while !over.load(Ordering::Relaxed) && since.elapsed() < 2 * BOUND {
                thread::sleep(Duration::from_millis(10)); // the call that blocks
            }
            while !outside.is_finished() && since.elapsed() < 3 * BOUND {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let starved = runtime::Builder::new_current_thread().enable_all().build().unwrap();
        starved.block_on(async {
            tokio::select! { () = told.pulse.beat() => {}, () = blocks => {} }
        });
        assert!(outside.join().unwrap().contains("truebeat_operator_leader"), "who is starved can still be scraped");
    }
}
