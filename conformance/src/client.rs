//! What the harness asks of a llama-server over HTTP, with deadlines.
//!
//! Requests carry token ids, never text, wherever prompts matter: the ids are what a state file is about.

use std::io::{BufRead as _, BufReader};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

/// How long one request may take: a 2,000-token prefill on one busy core is minutes at worst.
const REQUEST: Duration = Duration::from_secs(900);

/// A connection to one server.
#[derive(Clone)]
pub struct Client {
    agent: ureq::Agent,
    base: String,
    /// Ids that must not be generated.
    pub ban: Vec<i32>,
}

/// One generated token.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The token chosen.
    pub id: i32,
    /// Its natural-log probability.
    pub logprob: f64,
    /// The most probable tokens with their log probabilities, best first.
    pub top: Vec<(i32, f64)>,
}

/// A reply to a completion.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Completion {
    /// The generated tokens, in order; fewer than asked for if the reader stopped.
    pub steps: Vec<Step>,
    /// The text of them.
    pub text: String,
    /// Prompt tokens evaluated; absent when the reader stopped before the end.
    pub prompt_n: Option<u32>,
    /// Prompt tokens taken from the cache; absent likewise.
    pub cache_n: Option<u32>,
    /// Time the server spent on the prompt.
    pub prompt_ms: Option<f64>,
    /// The reader stopped before the end.
    pub cut: bool,
}

/// A reply to save or restore.
#[derive(Debug, Clone, PartialEq)]
pub struct SlotReply {
    /// Tokens saved or restored.
    pub tokens: u64,
    /// Bytes written or read.
    pub bytes: u64,
    /// The server's own time.
    pub ms: f64,
}

/// What to generate.
#[derive(Debug, Clone)]
pub struct Ask<'a> {
    /// The prompt.
    pub prompt: &'a [i32],
    /// Tokens to generate; 0 evaluates the prompt and leaves just it in the slot.
    pub n_predict: u32,
    /// How many of the most probable tokens to report at each step.
    pub n_probs: u32,
    /// Reuse what the slot holds.
    pub cache_prompt: bool,
    /// The slot.
    pub slot: u32,
    /// Go on after an end-of-text token.
    pub ignore_eos: bool,
}

impl Client {
    /// A client of the server at `base`, such as `http://127.0.0.1:8080`.
    pub fn new(base: &str) -> Client {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(REQUEST))
            .timeout_connect(Some(Duration::from_secs(5)))
            .proxy(None)
            .build();
        Client { agent: config.into(), base: base.trim_end_matches('/').to_owned(), ban: Vec::new() }
    }

    /// Its base address.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Whether `/health` says ok.
    pub fn healthy(&self) -> bool {
        let request =
            self.agent.get(format!("{}/health", self.base)).config().timeout_global(Some(Duration::from_secs(5)));
        matches!(request.build().call(), Ok(r) if r.status().as_u16() == 200)
    }

    /// `/props`.
    pub fn props(&self) -> Result<Value> {
        let url = format!("{}/props", self.base);
        let response = self.agent.get(&url).call().with_context(|| format!("GET {url}"))?;
        read(response, "GET /props")
    }

    fn post(&self, path: &str, body: &Value) -> Result<ureq::http::Response<ureq::Body>> {
        let url = format!("{}{path}", self.base);
        let request = self.agent.post(&url).header("Content-Type", "application/json");
        request.send(body.to_string()).with_context(|| format!("POST {url}"))
    }

    fn ask(&self, path: &str, body: &Value) -> Result<Value> {
        read(self.post(path, body)?, &format!("POST {path}"))
    }

    /// The ids of a text, with the beginning-of-text token where the model adds one and special tokens recognised.
    pub fn tokenize(&self, text: &str) -> Result<Vec<i32>> {
        let reply = self.ask("/tokenize", &json!({"content": text, "add_special": true, "parse_special": true}))?;
        ids(&reply["tokens"]).context("the reply to /tokenize")
    }

    /// The text of some ids.
    pub fn detokenize(&self, tokens: &[i32]) -> Result<String> {
        let reply = self.ask("/detokenize", &json!({"tokens": tokens}))?;
        Ok(reply["content"].as_str().context("/detokenize answered without content")?.to_owned())
    }

    /// A user's message as the model's chat template writes it.
    pub fn apply_template(&self, message: &str) -> Result<String> {
        let reply = self.ask("/apply-template", &json!({"messages": [{"role": "user", "content": message}]}))?;
        Ok(reply["prompt"].as_str().context("/apply-template answered without a prompt")?.to_owned())
    }

    /// Generates, greedily.
    pub fn complete(&self, ask: &Ask<'_>) -> Result<Completion> {
        // A server up to build 10566 answers 500 when a reply ends in the middle of a character; a token or two more helps.
        let mut last = None;
        for more in 0..4 {
            let mut body = self.completion_body(ask, false);
            body["n_predict"] = json!(ask.n_predict + more);
            let reply = match self.ask("/completion", &body) {
                Ok(reply) => reply,
                Err(e) if e.to_string().contains("does not match the expected") => {
                    last = Some(e);
                    continue;
                }
                Err(e) => return Err(e),
            };
            let mut out = Completion::default();
            out.text.push_str(reply["content"].as_str().unwrap_or(""));
            out.add_steps(&reply);
            out.add_timings(&reply)?;
            // n_predict 0 still reports the token it would have generated.
            out.steps.truncate(ask.n_predict as usize);
            return Ok(out);
        }
        Err(last.unwrap_or_else(|| anyhow::anyhow!("POST /completion: no answer")))
    }

    /// Generates, greedily. `go_on` sees each token as it comes; when it says no, the server is told to stop. Of a reply that
    /// ends in the middle of a character the last tokens are missing: the server keeps them back.
    pub fn complete_while(&self, ask: &Ask<'_>, mut go_on: impl FnMut(&Step) -> bool) -> Result<Completion> {
        let response = self.post("/completion", &self.completion_body(ask, true))?;
        if response.status().as_u16() != 200 {
            return Err(read(response, "POST /completion").err().unwrap_or_else(|| anyhow::anyhow!("no reason given")));
        }
        let mut out = Completion::default();
        let mut lines = BufReader::new(response.into_body().into_reader()).lines();
        loop {
            let Some(line) = lines.next() else { bail!("the reply to /completion ended without a last message") };
            let line = line.context("reading the reply to /completion")?;
            if let Some(error) = line.strip_prefix("error: ") {
                bail!("POST /completion: {error}");
            }
            let Some(data) = line.strip_prefix("data: ") else { continue };
            let chunk: Value = serde_json::from_str(data).context("a chunk of the reply to /completion")?;
            if !chunk["error"].is_null() {
                bail!("POST /completion: {}", chunk["error"]);
            }
            out.text.push_str(chunk["content"].as_str().unwrap_or(""));
            let seen = out.steps.len();
            out.add_steps(&chunk);
            for i in seen..out.steps.len() {
                if !go_on(&out.steps[i]) {
                    // Closing the connection cancels the task; the slot is free after at most one more token.
                    out.steps.truncate(i + 1);
                    out.cut = true;
                    return Ok(out);
                }
            }
            if chunk["stop"].as_bool() == Some(true) {
                out.add_timings(&chunk)?;
                return Ok(out);
            }
        }
    }

    fn completion_body(&self, ask: &Ask<'_>, stream: bool) -> Value {
        json!({
            "prompt": ask.prompt, "n_predict": ask.n_predict, "n_probs": ask.n_probs, "cache_prompt": ask.cache_prompt,
            "id_slot": ask.slot, "temperature": 0, "ignore_eos": ask.ignore_eos, "return_tokens": true, "stream": stream,
            "logit_bias": self.ban.iter().map(|id| json!([id, false])).collect::<Vec<_>>(),
        })
    }

    /// Evaluates a prompt and generates nothing.
    pub fn prefill(&self, prompt: &[i32], slot: u32) -> Result<Completion> {
        let ask = Ask { prompt, n_predict: 0, n_probs: 0, cache_prompt: false, slot, ignore_eos: true };
        self.complete(&ask)
    }

    /// Saves a slot to a file in the server's slot directory.
    pub fn save(&self, slot: u32, name: &str) -> Result<SlotReply> {
        let r = self.ask(&format!("/slots/{slot}?action=save"), &json!({"filename": name}))?;
        slot_reply(&r, "n_saved", "n_written", "save_ms")
    }

    /// Restores a slot from a file in the server's slot directory.
    pub fn restore(&self, slot: u32, name: &str) -> Result<SlotReply> {
        let r = self.ask(&format!("/slots/{slot}?action=restore"), &json!({"filename": name}))?;
        slot_reply(&r, "n_restored", "n_read", "restore_ms")
    }

    /// Empties a slot.
    pub fn erase(&self, slot: u32) -> Result<()> {
        self.ask(&format!("/slots/{slot}?action=erase"), &json!({})).map(|_| ())
    }
}

fn read(response: ureq::http::Response<ureq::Body>, what: &str) -> Result<Value> {
    let status = response.status().as_u16();
    let text = response.into_body().into_with_config().limit(256 << 20).read_to_string();
    let text = text.with_context(|| format!("reading the reply to {what}"))?;
    let value: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
    if status != 200 || value.is_null() {
        let said = value["error"]["message"].as_str().map_or_else(|| text.chars().take(300).collect(), str::to_owned);
        let hint = match said.as_str() {
            s if s.contains("--slot-save-path") => " (start the server with --slot-save-path)",
            // A router has no slots of its own.
            s if s.contains("Invalid action") => {
                " (is this a server in router mode? slots are not reachable through one)"
            }
            _ => "",
        };
        bail!("{what}: {status}: {said}{hint}");
    }
    Ok(value)
}

fn ids(value: &Value) -> Result<Vec<i32>> {
    let array = value.as_array().context("no token list")?;
    array
        .iter()
        .map(|v| v.as_i64().and_then(|n| i32::try_from(n).ok()).with_context(|| format!("{v} is no id")))
        .collect()
}

impl Completion {
    fn add_steps(&mut self, chunk: &Value) {
        let probs = chunk["completion_probabilities"].as_array();
        let tokens = ids(&chunk["tokens"]).unwrap_or_default();
        self.steps.extend(tokens.iter().enumerate().map(|(i, &id)| step(id, probs.and_then(|p| p.get(i)))));
    }

    fn add_timings(&mut self, chunk: &Value) -> Result<()> {
        let timings = &chunk["timings"];
        self.prompt_n = timings["prompt_n"].as_u64().map(|n| n as u32);
        self.cache_n = timings["cache_n"].as_u64().map(|n| n as u32);
        self.prompt_ms = timings["prompt_ms"].as_f64();
        ensure!(self.prompt_n.is_some(), "/completion answered without timings.prompt_n");
        Ok(())
    }
}

fn step(id: i32, probs: Option<&Value>) -> Step {
    let pair = |v: &Value| Some((v["id"].as_i64()? as i32, v["logprob"].as_f64()?));
    let mut top: Vec<_> = probs
        .and_then(|p| p["top_logprobs"].as_array())
        .map(|a| a.iter().filter_map(pair).collect())
        .unwrap_or_default();
    top.sort_by(|a: &(i32, f64), b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let logprob = probs.and_then(|p| p["logprob"].as_f64()).unwrap_or(f64::NAN);
    Step { id, logprob, top }
}

fn slot_reply(reply: &Value, tokens: &str, bytes: &str, ms: &str) -> Result<SlotReply> {
    let number = |key: &str| reply[key].as_u64().with_context(|| format!("the reply {reply} has no {key}"));
    Ok(SlotReply {
        tokens: number(tokens)?,
        bytes: number(bytes)?,
        ms: reply["timings"][ms].as_f64().with_context(|| format!("the reply {reply} has no timings.{ms}"))?,
    })
}
