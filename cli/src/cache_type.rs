//! The type of KV caches, as a flag.

use tandem_schedule::CacheType;

/// The flag of commands with KV caches. `tandem bench` declares it once more, since clap does not populate the group of
/// arguments that need `--serve` if one of them is flattened.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Flag {
    /// How KV caches store keys and values
    #[arg(
        long,
        visible_alias = "kv-cache-dtype",
        value_enum,
        default_value = "auto"
    )]
    cache_type: Choice,
}

impl From<Flag> for CacheType {
    fn from(flag: Flag) -> Self {
        flag.cache_type.into()
    }
}

/// How KV caches store keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// Not quantised: bf16 on a GPU, f32 on the CPU
    #[default]
    Auto,
    /// 8 bits without scales: numbers beyond ±448 are cut off, small ones lose bits
    #[value(name = "e4m3", aliases = ["fp8", "fp8_e4m3", "f8e4m3"])]
    E4m3,
    /// 8 bits with a scale for each token and KV head, computed when keys and values are written: more exact, 1.03 times
    /// the memory of e4m3 with heads of 128
    #[value(name = "e4m3-scaled")]
    E4m3Scaled,
}

impl From<Choice> for CacheType {
    fn from(choice: Choice) -> Self {
        match choice {
            Choice::Auto => Self::Auto,
            Choice::E4m3 => Self::E4m3,
            Choice::E4m3Scaled => Self::E4m3Scaled,
        }
    }
}

/// Words about caches that are not of the usual type, to be put behind a name; else nothing.
#[must_use]
pub fn mention(cache_type: CacheType) -> String {
    match cache_type {
        CacheType::Auto => String::new(),
        other => format!(", caches in {other}"),
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn names_are_those_of_files() {
        let choices = Choice::value_variants().iter();
        let choices: Vec<_> = choices.map(|&choice| CacheType::from(choice)).collect();
        assert_eq!(choices, CacheType::ALL);
        for choice in Choice::value_variants() {
            let name = choice.to_possible_value().unwrap().get_name().to_owned();
            assert_eq!(name, CacheType::from(*choice).name());
        }
        assert_eq!(Choice::from_str("fp8", false), Ok(Choice::E4m3));
    }
}
