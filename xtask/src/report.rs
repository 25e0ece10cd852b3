//! The static report as a table: printing, parsing, comparing.

use std::{collections::BTreeMap, fmt, fmt::Write as _};

/// A figure of a kernel.
pub struct Column {
    pub title: &'static str,
    /// Whether it must be equal even if another compiler or ptxas made the table. The other figures depend on register
    /// allocation and unrolling, which change slightly with each release.
    pub binding: bool,
}

const fn binding(title: &'static str) -> Column {
    Column {
        title,
        binding: true,
    }
}

const fn incidental(title: &'static str) -> Column {
    Column {
        title,
        binding: false,
    }
}

/// Figures from ptxas, then from the PTX, then from the machine code.
pub const COLUMNS: [Column; 18] = [
    incidental("regs"),
    binding("stack"),
    binding("spills"),
    binding("smem"),
    binding("barriers"),
    binding("bar"),
    incidental("bar.warp"),
    binding("cluster"),
    incidental("mbarrier"),
    incidental("HMMA"),
    incidental("HGMMA"),
    incidental("LDGSTS"),
    incidental("UTMALDG"),
    incidental("UBLKCP"),
    binding("USETMAXREG"),
    binding("LDL"),
    binding("STL"),
    incidental("code"),
];

/// The figures of one kernel, in the order of [`COLUMNS`].
pub type Figures = [u32; COLUMNS.len()];

/// Figures of all kernels, by architecture and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Versions of the compiler and of ptxas.
    pub tools: String,
    pub kernels: BTreeMap<(String, String), Figures>,
    /// Remarks of ptxas, each with its module first.
    pub notices: Vec<String>,
    /// The hash of the [sources](crate::sources).
    pub sources: String,
    /// A hash of each module, see [`unchanged`](crate::unchanged).
    pub modules: BTreeMap<String, String>,
}

const HEADING: &str = "\
# What each kernel takes of the GPU; `cargo xtask kernels --bless` writes this file.
# regs to barriers: ptxas's figures, per thread or block; spills: bytes stored and loaded.
# bar to mbarrier: instructions in the PTX (bar: block-wide and named barriers).
# HMMA to STL: instructions in the machine code; code: all of them. Lines with !: ptxas's remarks.
# Lines with =: hash of a module's PTX, cubin, figures and tools. The check assembles modules with another hash.
# The check compiles the kernels if the hash of their sources is another one.
";
const TOOLS: &str = "# Made by ";
const SOURCES: &str = "# Hash of the sources: ";
const NOTICE: &str = "! ";
const MODULE: &str = "= ";

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        let mut lines = vec![
            ["arch", "kernel"]
                .into_iter()
                .chain(COLUMNS.map(|column| column.title))
                .map(str::to_owned)
                .collect::<Vec<_>>(),
        ];
        lines.extend(self.kernels.iter().map(|((arch, kernel), figures)| {
            [arch.clone(), kernel.clone()]
                .into_iter()
                .chain(figures.map(|figure| figure.to_string()))
                .collect()
        }));
        let width = |at: usize| {
            lines
                .iter()
                .map(|line| line[at].len())
                .max()
                .unwrap_or_default()
        };
        let widths: Vec<usize> = (0..lines[0].len()).map(width).collect();

        writeln!(formatter, "{HEADING}{TOOLS}{}", self.tools)?;
        writeln!(formatter, "{SOURCES}{}\n", self.sources)?;
        for line in &lines {
            let mut text = String::new();
            for (at, (cell, width)) in line.iter().zip(&widths).enumerate() {
                // Names are left-aligned, numbers right-aligned.
                if at < 2 {
                    write!(text, "{cell:width$}  ")?
                } else {
                    write!(text, "{cell:>width$}  ")?
                }
            }
            writeln!(formatter, "{}", text.trim_end())?;
        }
        for notice in &self.notices {
            writeln!(formatter, "{NOTICE}{notice}")?;
        }
        for (module, hash) in &self.modules {
            writeln!(formatter, "{MODULE}{module} {hash}")?;
        }
        Ok(())
    }
}

impl Report {
    /// Parses the output of [`Display`](fmt::Display).
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut report = Self::default();
        let mut has_titles = false;
        for line in text.lines() {
            if let Some(tools) = line.strip_prefix(TOOLS) {
                report.tools = tools.into();
            } else if let Some(sources) = line.strip_prefix(SOURCES) {
                report.sources = sources.into();
            } else if let Some(notice) = line.strip_prefix(NOTICE) {
                report.notices.push(notice.into());
            } else if let Some(module) = line.strip_prefix(MODULE) {
                let (module, hash) = module.split_once(' ').ok_or("a module has no hash")?;
                report.modules.insert(module.into(), hash.into());
            } else if !line.is_empty() && !line.starts_with('#') {
                let mut words = line.split_whitespace();
                let (Some(arch), Some(kernel)) = (words.next(), words.next()) else {
                    return Err(format!("cannot read {line:?}"));
                };
                if !has_titles {
                    has_titles = true;
                    if !words.eq(COLUMNS.iter().map(|column| column.title)) {
                        return Err("its columns are others".into());
                    }
                    continue;
                }
                let figures: Vec<u32> = words.map_while(|word| word.parse().ok()).collect();
                let figures = figures
                    .try_into()
                    .map_err(|_| format!("cannot read {line:?}"))?;
                report.kernels.insert((arch.into(), kernel.into()), figures);
            }
        }
        Ok(report)
    }

    /// The remarks about a module.
    pub fn notices_of(&self, module: &str) -> impl Iterator<Item = &String> {
        let of_module = move |notice: &&String| notice.split(' ').next() == Some(module);
        self.notices.iter().filter(of_module)
    }

    /// Each figure and remark of `found` that differs from this report.
    pub fn differences(&self, found: &Self) -> Vec<String> {
        let mut differences = Vec::new();
        let all_count = self.tools == found.tools;
        let names: std::collections::BTreeSet<_> =
            self.kernels.keys().chain(found.kernels.keys()).collect();
        for name in names {
            let (arch, kernel) = name;
            match (self.kernels.get(name), found.kernels.get(name)) {
                (Some(_), None) => {
                    differences.push(format!("{arch} {kernel}: in the table, but not built"))
                }
                (None, Some(_)) => {
                    differences.push(format!("{arch} {kernel}: built, but not in the table"))
                }
                (Some(expected), Some(got)) => {
                    for ((column, expected), got) in COLUMNS.iter().zip(expected).zip(got) {
                        if expected != got && (all_count || column.binding) {
                            differences.push(format!(
                                "{arch} {kernel}: {} is {expected} in the table and {got} now",
                                column.title
                            ));
                        }
                    }
                }
                (None, None) => unreachable!("the name comes from one of them"),
            }
        }
        let missing_in = |from: &[String], of: &[String]| -> Vec<String> {
            from.iter()
                .filter(|notice| !of.contains(notice))
                .cloned()
                .collect()
        };
        differences.extend(
            missing_in(&self.notices, &found.notices)
                .iter()
                .map(|n| format!("no longer said: {n}")),
        );
        differences.extend(
            missing_in(&found.notices, &self.notices)
                .iter()
                .map(|n| format!("newly said: {n}")),
        );
        if all_count && differences.is_empty() && self.modules != found.modules {
            differences.push("only the hashes of modules: their PTX or cubins are others".into());
        }
        differences
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut figures = [0; COLUMNS.len()];
        (figures[0], figures[5]) = (168, 2);
        Report {
            tools: "rustc 1.96.0 (LLVM 22.1.8), ptxas 13.0.88".into(),
            kernels: [
                (("sm_80".into(), "merge".into()), [3; COLUMNS.len()]),
                (
                    ("sm_90a".into(), "prefill_with_a_long_name".into()),
                    figures,
                ),
            ]
            .into(),
            notices: vec!["sm_90a.prefill (C7510) Potential Performance Loss".into()],
            sources: "2e".into(),
            modules: [("sm_90a.prefill".into(), "1f".into())].into(),
        }
    }

    #[test]
    fn what_is_written_can_be_read() {
        for report in [
            report(),
            Report {
                tools: "rustc".into(),
                ..Report::default()
            },
        ] {
            assert_eq!(Report::parse(&report.to_string()), Ok(report));
        }
    }

    #[test]
    fn a_table_of_another_shape_is_refused() {
        let text = report().to_string();
        assert!(
            Report::parse(&text.replace("  USETMAXREG", ""))
                .unwrap_err()
                .contains("columns")
        );
        assert!(
            Report::parse(&text.replace("168", "lots"))
                .unwrap_err()
                .contains("lots")
        );
    }

    #[test]
    fn differences_show_both_values() {
        let (expected, mut found) = (report(), report());
        assert_eq!(expected.differences(&found), Vec::<String>::new());
        let mut figures = found
            .kernels
            .remove(&("sm_80".into(), "merge".into()))
            .unwrap();
        figures[0] = 40;
        figures[1] = 16;
        found
            .kernels
            .insert(("sm_80".into(), "merge".into()), figures);
        found
            .kernels
            .insert(("sm_90a".into(), "new".into()), figures);
        found.notices.clear();
        let differences = expected.differences(&found);
        assert_eq!(
            differences,
            [
                "sm_80 merge: regs is 3 in the table and 40 now",
                "sm_80 merge: stack is 3 in the table and 16 now",
                "sm_90a new: built, but not in the table",
                "no longer said: sm_90a.prefill (C7510) Potential Performance Loss",
            ]
        );
    }

    #[test]
    fn other_hashes_differ_even_if_all_figures_are_the_same() {
        let (expected, mut found) = (report(), report());
        found.modules.insert("sm_90a.prefill".into(), "20".into());
        let differences = expected.differences(&found);
        assert_eq!(differences.len(), 1, "{differences:?}");
        found.tools = "rustc 1.97.0".into();
        assert_eq!(expected.differences(&found), Vec::<String>::new());
    }

    #[test]
    fn remarks_are_found_by_module() {
        let report = report();
        assert_eq!(report.notices_of("sm_90a.prefill").count(), 1);
        assert_eq!(report.notices_of("sm_90a.pre").count(), 0);
    }

    #[test]
    fn another_compiler_is_held_to_what_matters() {
        let (expected, mut found) = (report(), report());
        found.tools = "rustc 1.97.0".into();
        let figures = found
            .kernels
            .get_mut(&("sm_80".into(), "merge".into()))
            .unwrap();
        figures[0] = 40;
        figures[5] = 4;
        assert_eq!(
            expected.differences(&found),
            ["sm_80 merge: bar is 3 in the table and 4 now"]
        );
    }
}
