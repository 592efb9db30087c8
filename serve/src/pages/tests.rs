//! Pages under arbitrary sequences of operations: the invariants hold after each, and what is found is what was put there.

use super::*;
use proptest::prelude::*;

impl Pages {
    /// What must hold at any time, given all tables there are.
    pub(crate) fn check<'a>(&self, tables: impl Iterator<Item = &'a Table>) -> Result<(), String> {
        let mut refs = vec![0; self.refs.len()];
        tables.flat_map(|t| &t.pages[t.left..]).for_each(|&p| refs[p as usize] += 1);
        if refs != self.refs {
            return Err(format!("references {:?}, tables say {refs:?}", self.refs));
        }
        let mut listed = vec![0; self.refs.len()];
        for (list, published) in [(self.free, false), (self.cached, true)] {
            let (mut at, mut before, mut len) = (list.first, NONE, 0);
            while at != NONE {
                if self.links[at as usize].0 != before || self.is_published(at) != published {
                    return Err(format!("page {at} is in a list it does not belong to"));
                }
                listed[at as usize] += 1;
                (before, at, len) = (at, self.links[at as usize].1, len + 1);
            }
            if len != list.len || before != list.last {
                return Err(format!("a list counts {} pages and has {len}", list.len));
            }
        }
        let owned_or_listed = |(r, l): (&u32, &u32)| (*r > 0) != (*l == 1) && *l <= 1;
        if !refs.iter().zip(&listed).all(owned_or_listed) {
            return Err(format!("pages both owned and free, or neither: {refs:?} {listed:?}"));
        }
        let Some(cache) = &self.cache else { return Ok(()) };
        let named = cache.names.iter().flatten().count();
        let back = |(key, page): (&Key, &Page)| cache.names[*page as usize].is_some_and(|(k, _)| k == *key);
        match named == cache.by_key.len() && cache.by_key.iter().all(back) {
            true => Ok(()),
            false => Err("the cache and its pages disagree".into()),
        }
    }
}

const SIZE: usize = 4;

impl Pages {
    /// Fills an empty table with the published pages that begin tokens; gives the number of tokens found.
    fn find(&mut self, table: &mut Table, tokens: &mut Tokens, most: usize) -> usize {
        let pages = self.known(tokens, most);
        self.take(table, tokens, 0..pages);
        pages * self.size
    }
}

/// A sequence as the scheduler has it: its tokens, and its table.
struct Owner {
    tokens: Tokens,
    salt: u8,
    table: Table,
}

fn tokens(ids: &[u32], salt: u8) -> Tokens {
    Tokens::new(Prompt::new(ids.to_vec(), vec![salt]), SIZE)
}

impl Owner {
    /// The first tokens.
    fn prefix(&self, n: usize) -> Vec<u32> {
        (0..n).map(|i| self.tokens.get(i)).collect()
    }
}

/// What each page really holds: for each position the whole prefix that made it, with its salt.
struct World {
    pages: Pages,
    owners: Vec<Owner>,
    memory: Vec<Option<(u8, Vec<u32>)>>,
}

impl World {
    fn new(cache: bool) -> World {
        let pages = Pages::new(12, SIZE, cache.then_some([7; 32]));
        World { memory: vec![None; 12 * SIZE], pages, owners: Vec::new() }
    }

    fn compute(&mut self, at: usize, from: usize) {
        let owner = &mut self.owners[at];
        for i in from..owner.tokens.len() {
            let slot = owner.table.pages[i / SIZE] as usize * SIZE + i % SIZE;
            self.memory[slot] = Some((owner.salt, owner.prefix(i + 1)));
        }
        let all = owner.tokens.len();
        self.pages.publish(&mut owner.table, &mut owner.tokens, all);
    }

    fn begin(&mut self, ids: Vec<u32>, salt: u8) {
        let (mut table, mut tokens) = (Table::default(), tokens(&ids, salt));
        let found = self.pages.find(&mut table, &mut tokens, usize::MAX);
        assert!(found < tokens.len());
        if !self.pages.grow(&mut table, tokens.len()) {
            self.pages.release(&mut table);
            return;
        }
        self.owners.push(Owner { tokens, salt, table });
        self.compute(self.owners.len() - 1, found);
    }

    fn extend(&mut self, at: usize, tokens: &[u32]) {
        let owner = &mut self.owners[at];
        let before = owner.tokens.len();
        if self.pages.grow(&mut owner.table, before + tokens.len()) {
            tokens.iter().for_each(|t| owner.tokens.push(*t));
            self.compute(at, before);
        }
    }

    fn fork(&mut self, at: usize) {
        let from = &self.owners[at];
        let known = from.tokens.len() - 1;
        let (whole, of) = (known / SIZE, from.table.pages[known / SIZE] as usize * SIZE);
        let (tokens, salt) = (tokens(&from.prefix(from.tokens.len()), from.salt), from.salt);
        let mut table = Table::default();
        self.pages.fork(&from.table, 0..whole, &mut table);
        if !self.pages.grow(&mut table, tokens.len()) {
            self.pages.release(&mut table);
            return;
        }
        // What is shared in part is copied whole.
        let to = table.pages[whole] as usize * SIZE;
        (0..SIZE).for_each(|i| self.memory[to + i] = self.memory[of + i].clone());
        self.owners.push(Owner { tokens, salt, table });
        self.compute(self.owners.len() - 1, known);
    }

    fn end(&mut self, at: usize) {
        let mut owner = self.owners.swap_remove(at);
        self.pages.release(&mut owner.table);
        assert!(owner.table.pages().is_empty());
    }

    fn check(&self) {
        self.pages.check(self.owners.iter().map(|o| &o.table)).unwrap();
        for owner in &self.owners {
            for i in 0..owner.tokens.len() {
                let slot = owner.table.pages[i / SIZE] as usize * SIZE + i % SIZE;
                assert_eq!(self.memory[slot], Some((owner.salt, owner.prefix(i + 1))));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn no_sequence_of_operations_breaks_them(
        cache in any::<bool>(),
        ops in prop::collection::vec((0u8..8, any::<u8>(), prop::collection::vec(0u32..2, 1..14)), 1..60),
    ) {
        let mut world = World::new(cache);
        for (op, which, tokens) in ops {
            let at = usize::from(which) % world.owners.len().max(1);
            match op {
                0..=2 => world.begin(tokens, which % 2),
                _ if world.owners.is_empty() => {}
                3 => world.fork(at),
                4 | 5 => world.extend(at, &tokens[..tokens.len().min(5)]),
                _ => world.end(at),
            }
            world.check();
        }
        while !world.owners.is_empty() {
            world.end(0);
            world.check();
        }
        prop_assert_eq!(world.pages.available(), 12);
        prop_assert!(cache || world.pages.cached() == 0);
    }
}

#[test]
fn a_prompt_is_found_again_but_never_whole_nor_under_another_salt() {
    let mut world = World::new(true);
    world.begin((0..8).collect(), 0);
    world.end(0);
    assert_eq!((world.pages.cached(), world.pages.free()), (2, 10));
    let find = |world: &mut World, n: u32, salt: u8| {
        let mut table = Table::default();
        let found =
            world.pages.find(&mut table, &mut self::tokens(&(0..n).collect::<Vec<_>>(), salt), usize::MAX);
        world.pages.release(&mut table);
        found
    };
    assert_eq!(find(&mut world, 8, 0), 4);
    assert_eq!(find(&mut world, 9, 0), 8);
    assert_eq!(find(&mut world, 9, 1), 0);
}

#[test]
fn the_least_recently_used_goes_first_and_a_prefix_after_what_follows_it() {
    let mut world = World::new(true);
    world.begin(vec![1; 16], 0);
    world.begin(vec![2; 16], 0);
    world.end(0);
    world.end(0);
    world.begin(vec![3; 5 * SIZE], 0);
    world.check();
    let found = |world: &mut World, token: u32| {
        let mut table = Table::default();
        let found = world.pages.find(&mut table, &mut tokens(&[token; 17], 0), usize::MAX);
        world.pages.release(&mut table);
        found
    };
    assert_eq!((found(&mut world, 1), found(&mut world, 2)), (12, 16));
}

#[test]
fn equal_keys_of_other_tokens_are_not_believed() {
    let mut world = World::new(true);
    world.begin((0..8).collect(), 0);
    let (key, page) = (world.owners[0].tokens.key(0), world.owners[0].table.pages[0]);
    let cache = world.pages.cache.as_mut().unwrap();
    assert_eq!(cache.by_key[&key], page);
    cache.tokens[page as usize * SIZE] = 99;
    let (mut table, mut tokens) = (Table::default(), tokens(&(0..9).collect::<Vec<_>>(), 0));
    assert_eq!(world.pages.find(&mut table, &mut tokens, usize::MAX), 0);
    assert!(world.pages.grow(&mut table, 8));
    world.pages.publish(&mut table, &mut tokens, 8);
    assert!(table.collided);
}

#[test]
fn a_page_of_a_sequence_has_the_same_key_whoever_began_it() {
    let pages = Pages::new(1, SIZE, Some([7; 32]));
    let ids: Vec<u32> = (0..23).collect();
    let keys = |prompt: usize, salt: u8| {
        let mut tokens = tokens(&ids[..prompt], salt);
        ids[prompt..].iter().for_each(|t| tokens.push(*t));
        // In two goes, as a sequence grows.
        pages.extend_keys(&mut tokens, 2);
        pages.extend_keys(&mut tokens, 5);
        (0..5).for_each(|p| assert_eq!(tokens.page(p), &ids[p * SIZE..][..SIZE]));
        (0..5).map(|p| (tokens.parent(p), tokens.key(p))).collect::<Vec<_>>()
    };
    let whole = keys(23, 0);
    assert!(whole.windows(2).all(|w| w[0].1 == w[1].0));
    (1..23).for_each(|prompt| assert_eq!(keys(prompt, 0), whole));
    assert!(keys(9, 1).iter().zip(&whole).all(|(a, b)| a.1 != b.1));
}
