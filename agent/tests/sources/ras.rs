//! The RAS client against a server that speaks NCCL's protocol, and against ones that do not.

use std::time::{Duration, Instant};

use agent::sources::RasSource;
use agent::sources::ras::{AskError, ask};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use vitals::ras::parse;

use crate::http::eventually_async;
use crate::ras_server::{JSON, Manner, TEXT, server};

const AMPLE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn json_where_the_service_can_and_text_where_it_cannot() {
    let answer = ask(&server(Manner::Json).await, AMPLE).await.unwrap();
    assert_eq!(answer, JSON);
    let answer = ask(&server(Manner::Text).await, AMPLE).await.unwrap();
    assert_eq!(answer, TEXT);
    assert_eq!(parse(&answer).unwrap().communicators.len(), 1);
}

#[tokio::test]
async fn the_source_names_the_silent_rank_and_says_nothing_where_nobody_listens() {
    let source = RasSource::spawn(&server(Manner::Json).await);
    let told = eventually_async("an answer", async || source.latest().value).await;
    assert_eq!((told.silent_ranks, told.answered), (vec![2], true));
    assert_eq!(source.answer(), Some((source.latest().at_ms, JSON.to_owned())), "word for word, for the evidence");
    let source = RasSource::spawn(&server(Manner::Hangup).await);
    let told = eventually_async("a failure", async || source.latest().value).await;
    assert!(!told.answered && told.silent_ranks.is_empty() && told.text.contains("could not talk"), "{told:?}");
    assert_eq!(source.answer(), None);
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string();
    assert!(matches!(ask(&closed, AMPLE).await, Err(AskError::Nobody { .. })));
    let source = RasSource::spawn(&closed);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(source.latest().value, None);
}

#[tokio::test]
async fn half_an_answer_and_a_slow_drip_end_at_the_deadline_and_a_flood_at_the_cap() {
    for manner in [Manner::Half, Manner::Drip] {
        let began = Instant::now();
        let error = ask(&server(manner).await, Duration::from_millis(400)).await.unwrap_err();
        assert!(matches!(error, AskError::Deadline { .. }), "{manner:?}: {error}");
        assert!(began.elapsed() < AMPLE, "{manner:?}");
    }
    let error = ask(&server(Manner::Flood).await, AMPLE).await.unwrap_err();
    assert!(matches!(error, AskError::TooLarge { bytes_max: 4_194_304, .. }), "{error}");
}

#[tokio::test]
async fn a_stranger_on_the_port_is_called_one_without_a_flood_of_words() {
    for greeting in ["HTTP/1.1 400 Bad Request\r\n\r\n".to_owned(), "\u{0}\u{1}\n".to_owned(), "A".repeat(1 << 20)] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.write_all(greeting.as_bytes()).await;
            std::future::pending::<()>().await;
        });
        let error = ask(&address, AMPLE).await.unwrap_err();
        assert!(matches!(error, AskError::Stranger { .. }), "{error}");
        assert!(error.to_string().len() < 400, "{error}");
    }
}
