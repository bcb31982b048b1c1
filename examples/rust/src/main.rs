//! Quire over gRPC from Rust: a text, a durable stream that survives its gateway, and errors with their details.
//!
//! Debian 12 has no tonic, so `call` speaks gRPC over the crate h2. With tonic only this part of the program changes.
//!
//! usage: client HOST:PORT [KEY]
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;

#[allow(dead_code)]
mod google {
    pub mod rpc {
        include!(concat!(env!("OUT_DIR"), "/google.rpc.rs"));
    }
}
#[allow(dead_code)]
mod quire {
    pub mod common {
        pub mod v1 {
            include!(concat!(env!("OUT_DIR"), "/quire.common.v1.rs"));
        }
    }
    pub mod gateway {
        pub mod v1 {
            include!(concat!(env!("OUT_DIR"), "/quire.gateway.v1.rs"));
        }
    }
}
use quire::common::v1::{constraint::Kind, Constraint, SamplingParameters};
use quire::gateway::v1::{
    generate_request, generate_stream_request, generate_stream_response, resume_stream_response, GenerateRequest,
    GenerateResponse, GenerateStreamRequest, GenerateStreamResponse, ResumeStreamRequest, ResumeStreamResponse,
    SequenceOffset, TokenChunk,
};

const PROMPT: &str = "Once upon a time";
const DEADLINE_EXCEEDED: i32 = 4;

/// The end of a call: its connection was lost or never there, or it has a status, with details.
#[derive(Debug)]
enum Failure {
    Lost(String),
    Status(i32, google::rpc::Status),
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure::Lost(error.to_string())
    }
}

struct Client {
    address: String,
    key: Option<String>,
}

/// The responses of one call. Dropping it cancels the call.
struct Responses {
    request_id: Option<String>,
    body: h2::RecvStream,
    received: BytesMut,
    headers: http::HeaderMap,
}

impl Client {
    /// Calls a method of GenerationService in a connection of its own.
    async fn call(&self, method: &str, request: &impl Message, timeout: Duration) -> Result<Responses, Failure> {
        let socket = tokio::net::TcpStream::connect(&self.address).await?;
        let (mut sender, connection) = h2::client::handshake(socket).await?;
        tokio::spawn(connection);
        let url = format!("http://{}/quire.gateway.v1.GenerationService/{method}", self.address);
        let mut head = http::Request::post(url)
            .header("content-type", "application/grpc+proto")
            .header("te", "trailers")
            .header("grpc-timeout", format!("{}m", timeout.as_millis()));
        if let Some(key) = &self.key {
            head = head.header("authorization", format!("Bearer {key}"));
        }
        let mut frame = BytesMut::new();
        frame.put_u8(0);
        frame.put_u32(request.encoded_len() as u32);
        request.encode(&mut frame)?;
        let (response, mut body) = sender.send_request(head.body(())?, false)?;
        body.send_data(frame.freeze(), true)?;
        let (head, body) = response.await?.into_parts();
        let request_id = head.headers.get("quire-request-id").map(|id| String::from_utf8_lossy(id.as_bytes()).into());
        Ok(Responses { request_id, body, received: BytesMut::new(), headers: head.headers })
    }
}

impl Responses {
    /// The next response; none at the end of a call that succeeded.
    async fn next<T: Message + Default>(&mut self) -> Result<Option<T>, Failure> {
        loop {
            if self.received.len() >= 5 {
                let size = (&self.received[1..5]).get_u32() as usize;
                if self.received.len() >= 5 + size {
                    let frame = self.received.split_to(5 + size);
                    return Ok(Some(T::decode(&frame[5..])?));
                }
            }
            let data: Bytes = match self.body.data().await {
                Some(data) => data?,
                None => return self.end().await,
            };
            self.body.flow_control().release_capacity(data.len())?;
            self.received.extend_from_slice(&data);
        }
    }

    async fn end<T>(&mut self) -> Result<Option<T>, Failure> {
        // A call without responses has its status in its only headers.
        let trailers = self.body.trailers().await?.unwrap_or_else(|| self.headers.clone());
        let text = |name| trailers.get(name).and_then(|value| value.to_str().ok());
        match text("grpc-status").and_then(|code| code.parse().ok()) {
            Some(0) => Ok(None),
            None => Err(Failure::Lost("the call has no status".into())),
            Some(code) => {
                let details = text("grpc-status-details-bin").unwrap_or_default().trim_end_matches('=');
                let details = base64::decode_config(details, base64::STANDARD_NO_PAD)?;
                Err(Failure::Status(code, google::rpc::Status::decode(&details[..])?))
            }
        }
    }
}

fn sampling(temperature: f32) -> Option<SamplingParameters> {
    // The text has characters of one to four bytes.
    let constraint = Constraint { kind: Some(Kind::Regex("(é [a-z]{2} 🦊 ){12}".into())), ..Default::default() };
    Some(SamplingParameters { temperature: Some(temperature), constraint: Some(constraint), ..Default::default() })
}

async fn generate(client: &Client, temperature: f32, timeout: Duration) -> Result<String, Failure> {
    let prompt = Some(generate_request::Prompt::Text(PROMPT.into()));
    let request = GenerateRequest { prompt, sampling: sampling(temperature), ..Default::default() };
    let mut responses = client.call("Generate", &request, timeout).await?;
    let response: Option<GenerateResponse> = responses.next().await?;
    Ok(response.map(|mut found| found.sequences.remove(0).text).unwrap_or_default())
}

/// What the client has of a stream's text.
#[derive(Default)]
struct Held {
    text: String,
    tokens: u32,
}

impl Held {
    fn add(&mut self, chunk: TokenChunk) {
        self.text += &chunk.text;
        self.tokens += chunk.token_ids.len() as u32;
        eprintln!("tokens: {}", self.tokens);
    }

    /// Offsets count tokens, and Unicode code points: not the bytes of `len`.
    fn offset(&self) -> SequenceOffset {
        let num_characters = Some(self.text.chars().count() as u32);
        SequenceOffset { offset: self.tokens, num_characters, ..Default::default() }
    }

    async fn begin(&mut self, responses: &mut Responses) -> Result<(), Failure> {
        while let Some(response) = responses.next::<GenerateStreamResponse>().await? {
            if let Some(generate_stream_response::Event::Chunk(chunk)) = response.event {
                self.add(chunk);
            }
        }
        Ok(())
    }

    async fn resume(&mut self, client: &Client, request_id: &str, timeout: Duration) -> Result<(), Failure> {
        let request = ResumeStreamRequest { request_id: request_id.into(), offsets: vec![self.offset()] };
        let mut responses = client.call("ResumeStream", &request, timeout).await?;
        while let Some(response) = responses.next::<ResumeStreamResponse>().await? {
            if let Some(resume_stream_response::Event::Chunk(chunk)) = response.event {
                self.add(chunk);
            }
        }
        Ok(())
    }
}

/// A stream that continues through another gateway when its own is lost.
async fn stream(client: &Client, timeout: Duration) -> Result<(String, u32), Failure> {
    let prompt = Some(generate_stream_request::Prompt::Text(PROMPT.into()));
    let request =
        GenerateStreamRequest { prompt, sampling: sampling(0.0), durable: Some(true), ..Default::default() };
    let mut responses = client.call("GenerateStream", &request, timeout).await?;
    let request_id = responses.request_id.clone().unwrap_or_default();
    let (mut held, mut resumed) = (Held::default(), 0);
    let mut outcome = held.begin(&mut responses).await;
    while let (Err(Failure::Lost(_)), true) = (&outcome, resumed < 100) {
        resumed += 1;
        tokio::time::sleep(Duration::from_millis(100)).await;
        outcome = held.resume(client, &request_id, timeout).await;
    }
    outcome.map(|()| (held.text, resumed))
}

/// The reason in the details of an error, and the fields at fault.
fn describe(outcome: Result<String, Failure>) -> String {
    let Err(Failure::Status(_, status)) = outcome else { return format!("{outcome:?}") };
    let mut parts = Vec::new();
    for detail in status.details {
        let value = &detail.value[..];
        if detail.type_url.ends_with("/google.rpc.ErrorInfo") {
            parts.extend(google::rpc::ErrorInfo::decode(value).map(|info| info.reason));
        } else if detail.type_url.ends_with("/google.rpc.BadRequest") {
            let fields = google::rpc::BadRequest::decode(value).map(|found| found.field_violations);
            parts.extend(fields.unwrap_or_default().into_iter().map(|each| each.field));
        }
    }
    parts.join(" ")
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().expect("usage: client HOST:PORT [KEY]");
    let client = Client { address: address.clone(), key: arguments.next() };
    let (minute, soon) = (Duration::from_secs(60), Duration::from_millis(50));

    println!("text: {}", generate(&client, 0.0, minute).await?);
    let (text, resumed) = stream(&client, minute).await?;
    println!("stream: {text}");
    println!("resumed: {}", resumed > 0);
    println!("refused: {}", describe(generate(&client, -1.0, minute).await));
    let wrong = Client { address, key: Some("wrong".into()) };
    println!("wrong key: {}", describe(generate(&wrong, 0.0, minute).await));
    let late = generate(&client, 0.0, soon).await;
    println!("deadline: {}", matches!(late, Err(Failure::Status(DEADLINE_EXCEEDED, _))));
    // A call whose future is dropped is cancelled on the server, too.
    let left = tokio::time::timeout(soon, generate(&client, 0.0, minute)).await;
    println!("cancelled: {}", left.is_err());
    Ok(())
}
