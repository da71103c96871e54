//! What `setup` asks of a running llama-server over HTTP. A handoff never does: it knows files and memory only.

use std::time::Duration;

use serde_json::{Value, json};

use crate::env;
use crate::exit::{Error, Kind, Result};

/// How long one request may take: a long prompt on a slow machine is minutes at worst.
const REQUEST: Duration = Duration::from_secs(900);
/// How long the server may take to take the connection and to say that it is well.
const CONNECT: Duration = Duration::from_secs(5);
/// More than any reply that is asked for here.
const MAX_REPLY: u64 = 64 << 20;

/// A server at an address.
#[derive(Clone)]
pub struct Server {
    agent: ureq::Agent,
    base: String,
    bearer: Option<String>,
}

/// A reply to a completion.
#[derive(Debug)]
pub struct Reply {
    /// Prompt tokens that were evaluated.
    pub prompt_n: u64,
    /// The time that took.
    pub prompt_ms: f64,
    /// The tokens of the reply.
    pub tokens: Vec<i32>,
}

/// A reply to a restore.
#[derive(Debug)]
pub struct Restored {
    /// Tokens the server says it holds.
    pub tokens: u64,
    /// Bytes it read.
    pub bytes: u64,
    /// The server's own time.
    pub ms: f64,
}

impl Server {
    /// The server at `base`, such as `http://127.0.0.1:8080`.
    ///
    /// # Errors
    /// The address is not one that can be asked.
    pub fn new(base: &str) -> Result<Server> {
        let base = base.trim_end_matches('/');
        if !base.starts_with("http://") {
            let text = format!("--server {base}: an address such as http://127.0.0.1:8080 (without https)");
            return Err(Error::new(Kind::Usage, text));
        }
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(REQUEST))
            .timeout_connect(Some(CONNECT))
            .proxy(None)
            .build();
        let bearer = env::API_KEY.get().and_then(|k| k.into_string().ok());
        Ok(Server { agent: config.into(), base: base.to_owned(), bearer })
    }

    /// Its address.
    pub fn base(&self) -> &str {
        &self.base
    }

    fn failed(what: &str, why: &str) -> Error {
        Error::new(Kind::Unavailable, format!("the server's answer to {what}: {why}"))
    }

    /// Whether `/health` says ok.
    ///
    /// # Errors
    /// It does not.
    pub fn is_well(&self) -> Result<()> {
        let request =
            self.agent.get(format!("{}/health", self.base)).config().timeout_global(Some(CONNECT)).build().call();
        let why = match request {
            Ok(r) if r.status().as_u16() == 200 => return Ok(()),
            Ok(r) if r.status().as_u16() == 503 => "it is still loading its model; try again when it has".to_owned(),
            Ok(r) => format!("it answers {} to /health", r.status().as_u16()),
            Err(e) => format!("{e}; is llama-server running there?"),
        };
        Err(Error::new(Kind::Unavailable, format!("the server {}: {why}", self.base)))
    }

    /// `/props`.
    ///
    /// # Errors
    /// The server does not say.
    pub fn props(&self) -> Result<Value> {
        let what = "GET /props";
        let mut request = self.agent.get(format!("{}/props", self.base));
        if let Some(key) = &self.bearer {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        read(request.call().map_err(|e| Server::failed(what, &e.to_string()))?, what)
    }

    fn ask(&self, path: &str, body: &Value) -> Result<Value> {
        let what = format!("POST {path}");
        let mut request = self.agent.post(format!("{}{path}", self.base)).header("Content-Type", "application/json");
        if let Some(key) = &self.bearer {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        read(request.send(body.to_string()).map_err(|e| Server::failed(&what, &e.to_string()))?, &what)
    }

    /// The ids of a text, with the beginning-of-text token where the model adds one.
    ///
    /// # Errors
    /// The server does not say.
    pub fn tokenize(&self, text: &str) -> Result<Vec<i32>> {
        let reply = self.ask("/tokenize", &json!({"content": text, "add_special": true, "parse_special": true}))?;
        ids(&reply["tokens"]).ok_or_else(|| Server::failed("POST /tokenize", "no list of ids"))
    }

    /// Evaluates a prompt in slot 0 and generates `n` tokens, greedily. `reuse` takes what the slot holds.
    ///
    /// # Errors
    /// The server does not do it.
    pub fn complete(&self, prompt: &[i32], n: u32, reuse: bool) -> Result<Reply> {
        let body = json!({
            "prompt": prompt, "n_predict": n, "cache_prompt": reuse, "id_slot": 0, "temperature": 0,
            "return_tokens": true, "stream": false,
        });
        let reply = self.ask("/completion", &body)?;
        let timings = &reply["timings"];
        match (timings["prompt_n"].as_u64(), timings["prompt_ms"].as_f64()) {
            (Some(prompt_n), Some(prompt_ms)) => {
                Ok(Reply { prompt_n, prompt_ms, tokens: ids(&reply["tokens"]).unwrap_or_default() })
            }
            _ => Err(Server::failed("POST /completion", "no timings.prompt_n and timings.prompt_ms")),
        }
    }

    /// Saves slot 0 under a name in the server's directory of state files.
    ///
    /// # Errors
    /// The server does not do it.
    pub fn save(&self, name: &str) -> Result<()> {
        self.ask("/slots/0?action=save", &json!({"filename": name})).map(|_| ())
    }

    /// Restores slot 0 from a file in the server's directory of state files.
    ///
    /// # Errors
    /// The server does not do it.
    pub fn restore(&self, name: &str) -> Result<Restored> {
        let what = "/slots/0?action=restore";
        let reply = self.ask(what, &json!({"filename": name}))?;
        match (reply["n_restored"].as_u64(), reply["n_read"].as_u64(), reply["timings"]["restore_ms"].as_f64()) {
            (Some(tokens), Some(bytes), Some(ms)) => Ok(Restored { tokens, bytes, ms }),
            _ => Err(Server::failed(&format!("POST {what}"), "no n_restored, n_read and timings.restore_ms")),
        }
    }

    /// Empties slot 0.
    ///
    /// # Errors
    /// The server does not do it.
    pub fn erase(&self) -> Result<()> {
        self.ask("/slots/0?action=erase", &json!({})).map(|_| ())
    }
}

fn ids(value: &Value) -> Option<Vec<i32>> {
    value.as_array()?.iter().map(|v| v.as_i64().and_then(|n| i32::try_from(n).ok())).collect()
}

fn read(response: ureq::http::Response<ureq::Body>, what: &str) -> Result<Value> {
    let status = response.status().as_u16();
    let text = response.into_body().into_with_config().limit(MAX_REPLY).read_to_string();
    let text = text.map_err(|e| Server::failed(what, &e.to_string()))?;
    let value: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
    if status == 200 && !value.is_null() {
        return Ok(value);
    }
    let said = value["error"]["message"].as_str().map_or_else(|| text.chars().take(300).collect(), str::to_owned);
    let hint = match said.as_str() {
        s if s.contains("--slot-save-path") || status == 501 => {
            "; start the server with --slot-save-path DIR, and without --no-slots"
        }
        s if s.contains("Invalid action") => "; is it in router mode? slots are not reachable through a router",
        _ if status == 401 => "; it wants a key: set LLAMA_API_KEY",
        _ => "",
    };
    Err(Server::failed(what, &format!("{status}: {said}{hint}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!(Server::new("http://127.0.0.1:8080/").unwrap().base(), "http://127.0.0.1:8080");
        for bad in ["https://x", "127.0.0.1:8080", ""] {
            assert_eq!(Server::new(bad).err().map(|e| e.kind), Some(Kind::Usage), "{bad}");
        }
    }

    #[test]
    fn lists_of_ids() {
        assert_eq!(ids(&json!([1, 2, -3])), Some(vec![1, 2, -3]));
        for bad in [json!(null), json!([1, "2"]), json!([5_000_000_000i64]), json!([1.5])] {
            assert_eq!(ids(&bad), None, "{bad}");
        }
    }
}
