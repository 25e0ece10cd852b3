//! `--gpus` and `--deal`: how a batch is distributed over GPUs.

use std::{fmt, str::FromStr};

use tandem_attn::{
    abi::MAX_GROUP,
    problem::{Batch, Spec},
    shard::{Keys, MAX_RANKS, ShardError, Sharding},
};

/// Options for several GPUs.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Several GPUs")]
pub struct Dealing {
    /// Number of GPUs of one host that share each batch
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_RANKS)))]
    pub gpus: u32,
    /// What is distributed: heads, pages:N (keys, N pages to each GPU in turn), contiguous or folded (keys), queries;
    /// heads:M+… for M shares of heads, each distributed further [default: each that the batch allows]
    #[arg(long, value_name = "WHAT")]
    pub deal: Vec<Deal>,
}

/// One way to distribute a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deal {
    /// Number of shares of heads; if none, one per GPU, unless something else is distributed.
    heads: Option<u32>,
    rest: Rest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    Nothing,
    Keys(Keys),
    Queries,
}

impl Deal {
    /// Shardings that are measured and shown by default.
    const USUAL: [&str; 3] = ["pages:16", "heads", "queries"];

    /// The sharding over `gpus` GPUs.
    ///
    /// # Errors
    /// If the shares of heads do not divide the number of GPUs.
    pub fn over(self, gpus: u32) -> Result<Sharding, String> {
        let heads = match (self.heads, self.rest) {
            (Some(heads), _) => heads,
            (None, Rest::Nothing) => gpus,
            (None, _) => 1,
        };
        if !gpus.is_multiple_of(heads) {
            return Err(format!(
                "{self}: {gpus} GPUs are not a multiple of {heads} shares of heads; give a number of shares that divides {gpus}"
            ));
        }
        let sharding = Sharding::one().over_heads(heads);
        let left = gpus / heads;
        match self.rest {
            Rest::Keys(keys) => Ok(sharding.over_keys(left, keys)),
            Rest::Queries => Ok(sharding.over_queries(left)),
            Rest::Nothing if left == 1 => Ok(sharding),
            Rest::Nothing => Err(format!(
                "{self}: {left} GPUs for each share of heads; distribute keys or queries too, as in heads:{heads}+pages:16"
            )),
        }
    }
}

impl FromStr for Deal {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} cannot be distributed: give heads, pages:16, contiguous, folded, queries, or heads:2+pages:16"
            )
        };
        let count = |text: &str| {
            text.parse()
                .ok()
                .filter(|count| *count > 0u32)
                .ok_or_else(wrong)
        };
        let (heads, rest) = match text.strip_prefix("heads") {
            Some("") => (None, ""),
            Some(more) => {
                let more = more.strip_prefix(':').ok_or_else(wrong)?;
                let (heads, rest) = match more.split_once('+') {
                    Some((_, "")) => return Err(wrong()),
                    Some(parts) => parts,
                    None => (more, ""),
                };
                (Some(count(heads)?), rest)
            }
            None => (None, text),
        };
        let rest = match rest {
            "" if text.is_empty() => return Err(wrong()),
            "" => Rest::Nothing,
            "contiguous" => Rest::Keys(Keys::Contiguous),
            "folded" => Rest::Keys(Keys::Folded),
            "queries" => Rest::Queries,
            other => {
                let pages = other.strip_prefix("pages:").ok_or_else(wrong)?;
                Rest::Keys(Keys::RoundRobin {
                    pages: count(pages)?,
                })
            }
        };
        Ok(Self { heads, rest })
    }
}

impl fmt::Display for Deal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.heads {
            Some(heads) => write!(f, "heads:{heads}")?,
            None if self.rest == Rest::Nothing => write!(f, "heads")?,
            None => {}
        }
        if self.heads.is_some() && self.rest != Rest::Nothing {
            write!(f, "+")?;
        }
        match self.rest {
            Rest::Nothing => Ok(()),
            Rest::Keys(Keys::RoundRobin { pages }) => write!(f, "pages:{pages}"),
            Rest::Keys(Keys::Contiguous) => write!(f, "contiguous"),
            Rest::Keys(_) => write!(f, "folded"),
            Rest::Queries => write!(f, "queries"),
        }
    }
}

/// Whether the results of this number of ranks can be merged.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) const fn mergeable(ranks: u32) -> bool {
    ranks as usize <= MAX_GROUP
}

impl Dealing {
    /// Checks that the requested shardings can run: ranks with different keys of the same heads merge their results.
    ///
    /// # Errors
    /// A requested sharding with more ranks in a group than can merge.
    pub fn check_groups(&self) -> Result<(), String> {
        for deal in &self.deal {
            let keys = deal.over(self.gpus)?.keys;
            if !mergeable(keys) {
                return Err(format!(
                    "--deal {deal}: {keys} GPUs would merge their results, and at most {MAX_GROUP} can: give more shares of \
                     heads, as in heads:2+pages:16, or fewer --gpus"
                ));
            }
        }
        Ok(())
    }

    /// The shardings of a batch: the requested ones, or those defaults that the batch allows.
    ///
    /// # Errors
    /// A requested sharding that is not possible.
    pub fn shardings(&self, spec: &Spec, batch: &Batch) -> Result<Vec<(Deal, Sharding)>, String> {
        let chosen = !self.deal.is_empty();
        let usual = Deal::USUAL
            .iter()
            .map(|deal| deal.parse().expect("they are ways"));
        let deals: Vec<Deal> = match chosen {
            true => self.deal.clone(),
            false => usual.collect(),
        };
        let prompts = (0..batch.requests()).any(|request| batch.q_len(request) > 1024);
        let mut shardings = Vec::new();
        for deal in deals {
            if !chosen && deal.rest == Rest::Queries && !prompts {
                continue;
            }
            let sharding = deal.over(self.gpus)?;
            match sharding.shares(spec, batch) {
                Ok(_) => shardings.push((deal, sharding)),
                Err(ShardError::Heads { .. } | ShardError::Positions { .. }) if !chosen => {}
                Err(error) => return Err(format!("{deal}: {error}")),
            }
        }
        Ok(shardings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_parsed_is_printed() {
        for text in [
            "heads",
            "queries",
            "folded",
            "contiguous",
            "pages:4",
            "heads:8+pages:16",
            "heads:2+queries",
        ] {
            let deal: Deal = text.parse().unwrap();
            assert_eq!(deal.to_string(), text);
        }
        for text in [
            "",
            "pages",
            "pages:0",
            "heads:",
            "heads8",
            "keys",
            "heads:2+",
            "folded+heads",
        ] {
            assert!(text.parse::<Deal>().is_err(), "{text}");
        }
    }

    #[test]
    fn groups_that_cannot_merge_are_refused() {
        let check = |gpus, deal: &str| {
            let deal = vec![deal.parse().unwrap()];
            Dealing { gpus, deal }.check_groups()
        };
        assert_eq!(check(8, "pages:16"), Ok(()));
        assert_eq!(check(16, "heads:2+pages:16"), Ok(()));
        assert_eq!(check(9, "heads"), Ok(()));
        let said = check(9, "pages:16").unwrap_err();
        assert!(
            said.contains("9 GPUs would merge") && said.contains("at most 8"),
            "{said}"
        );
    }

    #[test]
    fn heads_and_keys_make_as_many_ranks_as_there_are_gpus() {
        let sharding = "heads:8+pages:16"
            .parse::<Deal>()
            .unwrap()
            .over(72)
            .unwrap();
        assert_eq!(
            (sharding.heads, sharding.keys, sharding.ranks()),
            (8, 9, 72)
        );
        assert!("heads:8".parse::<Deal>().unwrap().over(72).is_err());
        assert!("heads:5+folded".parse::<Deal>().unwrap().over(8).is_err());
    }
}
