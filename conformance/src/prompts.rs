//! The fixed set of prompts that every model is asked: prose, code, lists, scripts other than Latin, and long ones.

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use crate::client::Client;
use crate::fixtures::Rng;

const TABLE: &str = include_str!("../prompts.toml");

/// One prompt.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prompt {
    /// Its name.
    pub name: String,
    /// Prose, code, list, non-latin, long, far (far longer than those) or edge.
    pub kind: String,
    /// At most this many ids.
    pub take: usize,
    /// Whether the text is the seed of a longer one.
    #[serde(default)]
    pub long: bool,
    /// The text.
    pub text: String,
}

#[derive(Deserialize)]
struct Table {
    prompt: Vec<Prompt>,
}

/// All prompts, in order.
pub fn all() -> Result<Vec<Prompt>> {
    let table: Table = toml::from_str(TABLE).context("prompts.toml, as built into this program")?;
    Ok(table.prompt)
}

impl Prompt {
    /// The whole text.
    pub fn full_text(&self) -> String {
        if !self.long {
            return self.text.clone();
        }
        // Entries that differ, so that attention has something to tell apart over the whole length.
        let mut rng = Rng::new(&self.name);
        let mut pick = |of: &[&str]| of[rng.below(of.len() as u32) as usize].to_owned();
        let mut out = String::new();
        let mut day = 0;
        while out.len() < self.take * 6 {
            day += 1;
            let who = pick(&["Marta", "the deputy", "old Henrik", "the night watch", "Ilse and her brother"]);
            let sky = pick(&["clear", "overcast", "low cloud", "thin rain", "a cold haze", "bright frost"]);
            let wind = pick(&["north", "north-east", "south", "west", "no wind at all", "gusts from the hills"]);
            let more = pick(&[
                "A letter came from the ministry and was put with the others.",
                "The cat slept on the map table and was not disturbed.",
                "One window pane is cracked and must be replaced before winter.",
                "Nobody could say who had left the gate open.",
                "The clock was seven minutes slow and has been put right.",
            ]);
            out.push_str(&format!("Day {day}, written by {who}. Sky: {sky}. Wind: {wind}. {} {more}\n", self.text));
        }
        out
    }

    /// Its ids by a server's tokeniser: at most `take`, at most `limit`, at least two.
    pub fn ids(&self, client: &Client, limit: usize) -> Result<Vec<i32>> {
        let mut ids =
            client.tokenize(&self.full_text()).with_context(|| format!("tokenising the prompt {}", self.name))?;
        ids.truncate(self.take.min(limit));
        ensure!(
            ids.len() >= 2,
            "the prompt {} has {} ids, two is the least there is to hand over",
            self.name,
            ids.len()
        );
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_set_is_varied_and_its_names_are_unique() {
        let all = all().unwrap();
        assert!(all.len() >= 20, "{}", all.len());
        for kind in ["edge", "prose", "code", "list", "non-latin", "long"] {
            assert!(all.iter().any(|p| p.kind == kind), "{kind}");
        }
        let mut names: Vec<_> = all.iter().map(|p| &p.name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all.len());
        let long = all.iter().find(|p| p.name == "log-2000").unwrap();
        assert!(long.full_text().len() > 10_000);
        assert_eq!(long.full_text(), long.full_text());
    }
}
