//! What the harness asks of a llama-server over HTTP, with deadlines.
//!
//! Requests carry token ids, never text, wherever prompts matter: the ids are what a state file is about.

use std::io::{BufRead as _, BufReader};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// How long one request may take: a 2,000-token prefill on one busy core is minutes at worst.
const REQUEST: Duration = Duration::from_secs(900);

/// What servers up to build 10566 say, with a 500, of a reply that is not whole UTF-8: one that ends within a character.
const NOT_UTF8: &str = "does not match the expected";

/// A connection to one server.
#[derive(Clone)]
pub struct Client {
    agent: ureq::Agent,
    base: String,
    /// Ids that must not be generated.
    pub ban: Vec<i32>,
}

/// One generated token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// The token chosen.
    pub id: i32,
    /// Its natural-log probability.
    pub logprob: f64,
    /// The most probable tokens with their log probabilities, best first.
    pub top: Vec<(i32, f64)>,
    /// The text that came with it: its own and, where it ends a character that other tokens began, theirs.
    pub text: String,
    /// There are such tokens before it. The server tells nothing of them but their part of the text.
    pub completes: bool,
}

/// A reply to a completion.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Completion {
    /// The generated tokens that end a character, in order; fewer if the reader stopped.
    pub steps: Vec<Step>,
    /// The text of them.
    pub text: String,
    /// Prompt tokens evaluated.
    pub prompt_n: Option<u32>,
    /// Prompt tokens taken from the cache.
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

    /// Generates, greedily. `go_on` sees each step as it comes; when it says no, the server is told to stop.
    ///
    /// A step is a token that ends a character: the server tells probabilities of those only, and keeps the tokens before them
    /// back.
    pub fn complete(&self, ask: &Ask<'_>, go_on: impl FnMut(&Step) -> bool) -> Result<Completion> {
        let ban: Vec<_> = self.ban.iter().map(|id| json!([id, false])).collect();
        self.generate(ask, &json!(ban), go_on)
    }

    /// What a server counted of a prompt: the reply to it is made to be one token of plain text. For servers that fail on a
    /// reply which is no text, and then tell nothing.
    pub fn count(&self, ask: &Ask<'_>) -> Result<Completion> {
        let plain = *self.tokenize(" a")?.last().context("a letter is no token")?;
        let ask = Ask { n_predict: 1, n_probs: 0, ..*ask };
        self.generate(&ask, &json!([[plain, 1000.0]]), |_| true)
    }

    fn generate(&self, ask: &Ask<'_>, bias: &Value, mut go_on: impl FnMut(&Step) -> bool) -> Result<Completion> {
        let body = json!({
            "prompt": ask.prompt, "n_predict": ask.n_predict, "n_probs": ask.n_probs, "cache_prompt": ask.cache_prompt,
            "id_slot": ask.slot, "temperature": 0, "ignore_eos": ask.ignore_eos, "stream": true, "timings_per_token": true,
            "logit_bias": bias,
        });
        let response = self.post("/completion", &body)?;
        if response.status().as_u16() != 200 {
            return Err(read(response, "POST /completion").err().unwrap_or_else(|| anyhow::anyhow!("no reason given")));
        }
        let mut out = Completion::default();
        let mut lines = BufReader::new(response.into_body().into_reader()).lines();
        loop {
            let Some(line) = lines.next() else { bail!("the reply to /completion ended without a last message") };
            let line = line.context("reading the reply to /completion")?;
            let Some(data) = line.strip_prefix("data: ").or_else(|| line.strip_prefix("error: ")) else { continue };
            let chunk: Value = serde_json::from_str(data).with_context(|| format!("a chunk of the reply: {data}"))?;
            let error = if chunk["error"].is_null() { &chunk["message"] } else { &chunk["error"] };
            if error.to_string().contains(NOT_UTF8) {
                // Everything was done; only the reply could not be told.
                return Ok(out);
            }
            if !error.is_null() {
                bail!("POST /completion: {error}");
            }
            let text = chunk["content"].as_str().unwrap_or("");
            out.text.push_str(text);
            out.add_timings(&chunk);
            for probs in chunk["completion_probabilities"].as_array().into_iter().flatten() {
                // n_predict 0 still reports the token it would have generated.
                let Some(step) = step(probs, text).filter(|_| ask.n_predict > 0) else { continue };
                let more = go_on(&step);
                out.steps.push(step);
                if !more {
                    // Closing the connection cancels the task; the slot is free after at most one more token.
                    out.cut = true;
                    return Ok(out);
                }
            }
            if chunk["stop"].as_bool() == Some(true) {
                ensure!(out.prompt_n.is_some(), "/completion answered without timings.prompt_n");
                return Ok(out);
            }
        }
    }

    /// Evaluates a prompt and generates nothing.
    pub fn prefill(&self, prompt: &[i32], slot: u32) -> Result<Completion> {
        let ask = Ask { prompt, n_predict: 0, n_probs: 0, cache_prompt: false, slot, ignore_eos: true };
        self.complete(&ask, |_| true)
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
    fn add_timings(&mut self, chunk: &Value) {
        let timings = &chunk["timings"];
        let number = |key: &str| timings[key].as_u64().and_then(|n| u32::try_from(n).ok());
        self.prompt_n = number("prompt_n").or(self.prompt_n);
        self.cache_n = number("cache_n").or(self.cache_n);
        self.prompt_ms = timings["prompt_ms"].as_f64().or(self.prompt_ms);
    }
}

fn step(probs: &Value, text: &str) -> Option<Step> {
    let pair = |v: &Value| Some((v["id"].as_i64()? as i32, v["logprob"].as_f64()?));
    let (id, logprob) = pair(probs)?;
    let mut top: Vec<_> = probs["top_logprobs"].as_array()?.iter().filter_map(pair).collect();
    top.sort_by(|a: &(i32, f64), b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    // The token's own bytes are told in the list only: beside the id stands the text that was sent with it.
    let listed = probs["top_logprobs"].as_array()?.iter().find(|v| v["id"].as_i64() == Some(id.into()));
    let own = listed.and_then(|v| v["bytes"].as_array()).map_or(text.len(), Vec::len);
    Some(Step { id, logprob, top, text: text.to_owned(), completes: text.len() > own })
}

fn slot_reply(reply: &Value, tokens: &str, bytes: &str, ms: &str) -> Result<SlotReply> {
    let number = |key: &str| reply[key].as_u64().with_context(|| format!("the reply {reply} has no {key}"));
    Ok(SlotReply {
        tokens: number(tokens)?,
        bytes: number(bytes)?,
        ms: reply["timings"][ms].as_f64().with_context(|| format!("the reply {reply} has no timings.{ms}"))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a server of state version 4 tells it.
    #[test]
    fn a_step_knows_whether_other_tokens_began_its_character() {
        let told = |text: &str, own: &[u8]| {
            let sent = text.as_bytes();
            let probs = json!({"id": 97, "token": text, "bytes": sent, "logprob": -2.3,
                "top_logprobs": [{"id": 97, "token": "?", "bytes": own, "logprob": -2.3}, {"id": 9, "token": " a",
                "bytes": [32, 97], "logprob": -3.0}]});
            step(&probs, text).unwrap()
        };
        let last = told(" \u{1f324}", &[164]);
        assert!(last.completes && last.text == " \u{1f324}" && last.top == [(97, -2.3), (9, -3.0)]);
        assert!(!told("\u{2600}", "\u{2600}".as_bytes()).completes);
        assert!(!told(" Sun", b" Sun").completes);
    }
}
